"""``python -m pretrain.prepare``: text and a tokenizer become a corpus folder. Offline; training never runs this code.

The built-in corpus is the exception: a run makes it before its first step. Reading a corpus belongs to pretrain.data.
"""
