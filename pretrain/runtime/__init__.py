"""The processes of a session: ranks, hardware, signals, the watchdog, stop votes, and how a process ends.

Nothing here knows what is trained.
"""
