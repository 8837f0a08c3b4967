"""Hugging Face export and import: the exported architecture, and the parts of ``head-schedules convert``.

Reading a run's weights belongs to pretrain.run and pretrain.checkpoint.
"""
