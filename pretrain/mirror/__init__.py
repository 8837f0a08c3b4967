"""Copies of checkpoints in a remote store: written in the background, and fetched when a run is lost."""
