"""Curves of runs: ``head-schedules plot runs/A runs/B``, and those that a run draws at its end."""
