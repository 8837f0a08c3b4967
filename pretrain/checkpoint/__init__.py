"""Checkpoints: written whole or not at all, verified, and read back by any number of ranks at any ZeRO stage.

Which run a checkpoint belongs to, and what may change when it goes on, belong to pretrain.run.
"""
