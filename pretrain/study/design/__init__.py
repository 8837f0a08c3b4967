"""Designed experiments: ``factors`` reads a design, ``arrays`` builds it, ``effects`` analyses its runs."""
