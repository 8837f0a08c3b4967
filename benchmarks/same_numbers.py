"""Does a change leave every number of training as it was?

    git worktree add ../before HEAD~1
    python benchmarks/same_numbers.py ../before                  # all, about ten minutes on two cores
    python benchmarks/same_numbers.py ../before --only growth    # those whose name holds the word

Trains each configuration in both checkouts for three steps, continues it for three more, perhaps with other
ranks, and compares all rows of metrics.jsonl except times. The exit code is 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BASE = (
    "--config micro --model prism-nano --vocab_size 512 --global_batch_tokens 512 --micro_batch 2 --name run "
    "--validation.every 3 --validation.sequences 8 --checkpoint.every 3 --diagnostics_every 3 "
    "--compile false --logging.wandb disabled"
)
TIMES = ("seconds", "tokens_per_second", "mfu", "ranks/")


class Configuration(NamedTuple):
    """Settings; ranks, ds_config and tensor-parallel degree of the first session and of the second."""

    flags: str = ""
    ranks: tuple[int, int] = (1, 1)
    ds_config: tuple[str, str] = ("zero2", "zero2")
    t: tuple[int, int] = (1, 1)


GROWS = "--growth.criterion incrt --growth.interval 1 --growth.calibration 1 --growth.grow_above 1e-6"
RULE = "{name: slow, parameters: [q, k], layers: upper_half, scale: 0.25, release: maturity, latest: 3}"
CONFIGURATIONS = {
    "one rank": Configuration(),
    "bf16": Configuration("--precision bf16"),
    "compiled": Configuration("--compile true"),
    "two ranks": Configuration("", (2, 2)),
    "stage 1": Configuration("", (2, 2), ("zero1", "zero1")),
    "stage 3": Configuration("", (2, 2), ("zero3", "zero3")),
    "t = 2": Configuration("", (2, 2), t=(2, 2)),
    "t = 2, then 1": Configuration("", (2, 1), ("zero1", "zero2"), (2, 1)),
    "ranks and stage": Configuration("", (2, 1), ("zero3", "zero1")),
    "offload": Configuration("", (1, 1), ("zero2_offload", "zero2_offload")),
    "document mask": Configuration("--document_mask true"),
    "maturity": Configuration(f"--maturity.every 1 --lr_rules '[{RULE}]'"),
    "classifier": Configuration("--task classification"),
    "muon": Configuration("--optimizer.kind muon"),
    "muon, t = 2": Configuration("--optimizer.kind muon", (2, 2), t=(2, 2)),
    "growth 1": Configuration(GROWS, (2, 2), ("zero1", "zero1")),
    "growth 2": Configuration(GROWS, (1, 1)),
    "growth 3": Configuration(GROWS, (2, 2), ("zero3", "zero3")),
}


def train(root: Path, folder: Path, name: str, data: Path) -> list[dict[str, Any]]:
    """The rows of a configuration, trained in the checkout *root*, without times."""
    configuration = CONFIGURATIONS[name]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for session, steps in enumerate((3, 6)):
        ranks = configuration.ranks[session]
        flags = f"{BASE} {configuration.flags} --steps {steps} --tensor_parallel {configuration.t[session]}"
        if "--precision" not in flags:
            flags += " --precision fp32"
        flags += f" --ds_config ds_configs/{configuration.ds_config[session]}.json"
        flags += f" --data_root {data} --runs_dir {folder}"
        launcher = ["torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
        command = [sys.executable, "-m", *launcher, "pretrain/main.py", *shlex.split(flags)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} in {root}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str | None:
    """The first difference."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} rows"
    for before, now in zip(one, other, strict=True):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return f"step {before['step']}: {key} {before.get(key)} != {now.get(key)}"
    return None


def main() -> None:
    """Print a line for each configuration."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("before", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as work:
        for name in (name for name in CONFIGURATIONS if options.only in name):
            data = Path(work) / "data"
            folders = [Path(work) / name.replace(" ", "_") / side for side in ("before", "now")]
            roots = (options.before.resolve(), ROOT)
            before, now = (train(*given, name, data) for given in zip(roots, folders, strict=True))
            difference = compare(before, now)
            failed |= difference is not None
            values = sum(len(row) for row in now)
            print(
                f"{name:<16} {difference or f'{values:,} values of {len(now)} steps are equal'}", flush=True
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
