"""Builds a DeepSpeed engine from a RunConfig and a ds_config.

Only this package and pretrain.checkpoint touch DeepSpeed's private names. Training steps belong to
pretrain.trainer.
"""
