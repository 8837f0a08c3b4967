"""Curves of runs: ``python -m pretrain.plots runs/A runs/B``, and those that a run draws at its end."""
