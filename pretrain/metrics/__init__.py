"""Sends measured figures to the console, metrics.jsonl and Weights & Biases.

Computing a figure belongs to the package that knows it: pretrain.evaluation, pretrain.diagnostics, the
trainer.
"""
