"""Validation: the loss on fixed held-out windows, and baselines of the same text that need no model."""
