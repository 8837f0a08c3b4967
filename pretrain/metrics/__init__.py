"""Sends measured values to the console, metrics.jsonl and Weights & Biases.

Each value is computed in the package that it belongs to: pretrain.evaluation, pretrain.diagnostics, the
trainer.
"""
