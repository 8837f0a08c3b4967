"""Your own study: two orders of the same heads, two seeds each, and a report with paired intervals.

    python examples/own_study.py

With 30 steps and two seeds it shows how, and finds nothing: docs/studies.md says how many seeds it takes.
"""

from pathlib import Path

from pretrain.study.command import main

Path("order.yaml").write_text(
    """
title: Does the order of head counts matter?
recipe: modern-micro
seeds: 2
settings: {steps: 30, compile: false, validation: {every: 10}, diagnostics_every: 0}
baseline: ascending
variants:
  ascending: {heads: [2, 4, 8, 16]}
  descending: {heads: [16, 8, 4, 2]}
"""
)
main(["run", "order.yaml", "--parallel", "2"])
main(["report", "runs/order"])
