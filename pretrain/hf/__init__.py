"""Hugging Face export and import: the exported architecture, and the parts of ``python -m pretrain.convert``.

Reading a run's weights belongs to pretrain.run and pretrain.checkpoint.
"""
