"""Runs before a study's, with seeds of their own: they choose settings (tuning) or variants (halving)."""
