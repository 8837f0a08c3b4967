"""What training reads: tokenizers, corpora, blends, the order of sequences, and the thread that loads batches.

How a corpus is made belongs to pretrain.prepare; where its text comes from, to pretrain.data.sources.
"""
