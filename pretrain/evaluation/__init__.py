"""Validation loss, and zero-shot scores through lm-eval: in training and as
``head-schedules evaluate``.

Values by layer and head belong to pretrain.diagnostics.
"""
