"""Small helpers without an opinion: files, plots, memory, strict readers.

What knows about runs, models or checkpoints does not belong here.
"""
