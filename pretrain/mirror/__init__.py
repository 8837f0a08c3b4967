"""Copies of checkpoints in a store elsewhere: written beside the training, and fetched when a run is lost."""
