"""Adds and prunes heads while a model trains, and reports what heads are worth.

spectrum.py  measure.py                           what a check measures of every layer
controller.py  models.py                          what is decided, and which models follow
edit.py  hook.py                                  what is done to a checkpoint, and the hook of the trainer
worth.py  law.py  figures.py  text.py  command.py ``python -m pretrain.growth report runs/NAME``
"""
