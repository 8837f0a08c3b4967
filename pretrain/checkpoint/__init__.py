"""Checkpoints: written atomically, verified, and read back by any number of ranks at any ZeRO stage.

Which run a checkpoint belongs to, and what may change on resume, are checked in pretrain.run.
"""
