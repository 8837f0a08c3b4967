"""Small helpers without an opinion: files, text, plots, memory.

What knows about runs, models or checkpoints does not belong here.
"""
