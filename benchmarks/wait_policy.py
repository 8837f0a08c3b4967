"""What waiting OpenMP threads cost: forward and backward of the default model, threads asleep or spinning.

    python benchmarks/wait_policy.py [--rounds 3]

Each figure is a process of its own; the policies take turns in every round, alone and beside one busy process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

MEASURE = """
import time, torch
from model.initialization import initialize
from model.presets import preset
from model.transformer import Transformer
config = preset("prism-tiny")
model = Transformer(config)
initialize(model, 1)
tokens = torch.randint(0, config.vocab_size, (16, config.context_length + 1))
def step():
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
for _ in range(2):
    step()
times = []
for _ in range(5):
    began = time.perf_counter()
    step()
    times.append(time.perf_counter() - began)
print(16 * config.context_length / sorted(times)[2])
"""
POLICIES = {
    "asleep (passive)": {"OMP_WAIT_POLICY": "passive"},
    "spinning (OpenMP's default)": {},
}


def tokens_per_second(settings: dict[str, str]) -> float:
    """Median of five steps in a fresh process."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    } | settings
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("| machine | threads that wait | tokens/s, median of rounds (all) |\n|---|---|---|")
    for busy in (False, True):
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            found: dict[str, list[float]] = {name: [] for name in POLICIES}
            for _ in range(rounds):
                for name, settings in POLICIES.items():
                    found[name].append(tokens_per_second(settings))
        finally:
            if hog is not None:
                hog.kill()
                hog.wait()
        for name, figures in found.items():
            every = ", ".join(f"{figure:,.0f}" for figure in figures)
            where = "beside one busy process" if busy else "otherwise idle"
            print(f"| {where} | {name} | {statistics.median(figures):,.0f} ({every}) |", flush=True)


if __name__ == "__main__":
    main()
