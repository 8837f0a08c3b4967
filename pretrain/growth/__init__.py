"""Heads that grow and are pruned while a model trains, and what every head of a trained model is worth."""
