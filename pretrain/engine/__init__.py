"""A RunConfig and a ds_config become a DeepSpeed engine.

Only this package and pretrain.checkpoint touch DeepSpeed's private names. Training steps belong to pretrain.trainer.
"""
