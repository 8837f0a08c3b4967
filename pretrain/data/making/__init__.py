"""Makes corpus folders: splits, a tokenizer trained on their text, and the files, from any text source.

``make_corpus`` does it in one process and in memory, as the built-in corpus needs it. ``pretrain.prepare``
does it for
text of any size: with several processes, over interruptions, from many kinds of files.
"""
