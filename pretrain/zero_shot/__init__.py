"""Zero-shot scores through lm-eval: the model it sees, the data sets it reads, the run."""
