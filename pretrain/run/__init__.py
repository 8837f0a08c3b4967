"""A run's folder: its configuration, data and lock, what may change on resume, and how saved runs are read.

The contents of a checkpoint belong to pretrain.checkpoint.
"""
