"""A run's folder: its configuration, its data, its lock, what may change on resume, and a saved run as others read it.

What lies inside a checkpoint belongs to pretrain.checkpoint.
"""
