"""``head-schedules plan``: memory, communication and time of a run, by arithmetic; and the micro-batch
that fits.

Nothing here allocates memory for a model or needs a process group.
"""
