"""Stands in for pretrain/main.py in tests of scheduling: leaves a run's files, a step at a time, and learns
nothing.

    python stand_in_run.py FOLDER STEPS [--fail STEP] [--seconds PER_STEP] [--pause STEP]

It continues where its metrics end, and ends with 75 when it is asked to stop, as a run does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--fail", type=int, default=-1)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--pause", type=int, default=0, help="end with 75 after so many steps of this session")
options = parser.parse_args()
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
options.folder.mkdir(parents=True, exist_ok=True)
metrics = options.folder / "metrics.jsonl"
first = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
print(f"began at step {first}", flush=True)
for step in range(first + 1, options.steps + 1):
    if asked or (options.pause and step > first + options.pause):
        sys.exit(75)
    if step == options.fail:
        print("error: data: no such corpus", flush=True)
        sys.exit(2)
    time.sleep(options.seconds)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "tokens": 10 * step, "val_loss": 5 - 0.1 * step}) + "\n")
    if step == options.steps:
        (options.folder / "latest").write_text(f"step_{step:06d}\n")
