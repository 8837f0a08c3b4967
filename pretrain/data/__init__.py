"""The training data: tokenizers, corpora, blends, the order of sequences, and the thread that loads batches.

Corpora are made by pretrain.prepare. Their text is read by pretrain.prepare.sources.
"""
