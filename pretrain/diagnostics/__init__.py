"""Measures a model's attention and residual stream layer by layer, while it trains and afterwards.

Losses and scores belong to pretrain.evaluation. The files:

attention.py  weights.py  forward.py              the measures
in_loop.py  maturity.py                           every N steps of a run (``--diagnostics_every``)
measure.py  comparison.py  figures.py  command.py of finished runs: ``head-schedules diagnose RUN …``
"""
