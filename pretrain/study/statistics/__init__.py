"""Statistics that know nothing of runs: paired differences, their power and outliers, and linear models."""
