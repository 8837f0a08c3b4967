"""Sequence classification: a labelled corpus, a head for classes, and accuracy as the validation."""
