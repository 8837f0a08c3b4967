"""``head-schedules prepare``: makes a corpus folder from text and a tokenizer, offline.

Training runs it for the built-in corpus only, before the first step. Reading a corpus belongs to
pretrain.data.
"""
