"""Text sources: plain text files, and Python's standard library as the built-in corpus.

A source yields documents in a fixed order. Other kinds of files are in pretrain.prepare.sources.
"""
