"""Tests of pretrain/data/."""
