"""Text sources: files, folders, Hugging Face datasets, and Python's standard library.

A source yields documents in a fixed order. Tokenizing and writing them belongs to pretrain.prepare.
"""
