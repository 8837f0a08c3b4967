"""Adds and prunes heads while a model trains, and reports what heads are worth.

spectrum.py  measure.py    what a check measures of every layer
check.py  models.py        what is decided, and which models follow
record.py  edit.py         what is remembered, and what is done to a checkpoint
hook.py                    the hook of the trainer
report/                    ``head-schedules growth report runs/NAME``
"""
