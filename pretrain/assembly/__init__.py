"""Makes everything that training a run consists of. Begin with open_run.py."""
