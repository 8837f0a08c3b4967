"""Statistics that know nothing of runs: paired intervals and power, signed ranks, linear models."""
