"""The optimizer's groups, their learning rates at every step, and the guard that skips spikes.

Reading and checking rules belongs to pretrain.config; DeepSpeed's optimizers belong to pretrain.engine.
"""
