"""The network, and nothing else: no data, no optimizer, no files."""
