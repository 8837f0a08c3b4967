"""Small helpers without an opinion: files, memory, processes, short text.

What knows about runs, models or checkpoints does not belong here.
"""
