"""Small general helpers: files, memory, processes, short text.

Code that knows about runs, models or checkpoints does not belong here.
"""
