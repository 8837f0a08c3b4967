"""Makes corpus folders: splits, a tokenizer trained on their text, and the files, from any text source."""
