"""Validation loss, and zero-shot scores through lm-eval: in training and as ``python -m
pretrain.evaluation``.

Values by layer and head belong to pretrain.diagnostics.
"""
