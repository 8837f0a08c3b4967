"""Counts the process groups that a run makes, by ranks that exist in name alone (torch's "fake" backend).

    python benchmarks/process_groups.py --ranks 512 --tensor_parallel 8 --stage 1

It goes from the start of the ranks to the built DeepSpeed engine, as rank 0 of a tiny model, and prints who called
torch.distributed.new_group how often, and how many of these groups the rank is in. No collective does anything, so the
numbers of the model mean nothing. The votes' group, which is gloo's, is counted and not made.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pretrain.config.command_line import parse_command_line
from pretrain.engine.batch import BatchPlan
from pretrain.engine.build import build_engine
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.engine.patches import prepare_deepspeed
from pretrain.runtime.control import Vote
from pretrain.runtime.world import start_world

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the counts of the process grid, of the votes and of DeepSpeed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensor_parallel", type=int, default=8)
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3))
    arguments = parser.parse_args()
    size, t = arguments.ranks, arguments.tensor_parallel
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
        LOCAL_WORLD_SIZE="8" if size % 8 == 0 else "1",
    )  # fmt: skip
    prepare_deepspeed()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)  # type: ignore[no-untyped-call]
    made: list[Sequence[int]] = []
    make = dist.new_group

    def counted(ranks: Sequence[int] | None = None, *rest: Any, **options: Any) -> Any:
        made.append(range(size) if ranks is None else ranks)
        return None if options.get("backend") == "gloo" else make(ranks, *rest, **options)

    def show(name: str) -> None:
        own = sorted(len(ranks) for ranks in made if 0 in ranks)
        print(f"{name:<14}{len(made)} calls of new_group; in {len(own)} groups, of {own} ranks")
        made.clear()

    dist.new_group = counted  # type: ignore[assignment]
    world = start_world(1, False, t)
    show("process grid")
    Vote(size)
    show("votes")
    run = parse_command_line(
        ["--model", "prism-nano", "--precision", "fp32", "--tensor_parallel", str(t), "--compile", "false"]
    ).run
    batch = BatchPlan(sequences=size // t, micro_batch=1, accumulation=1, data_parallel=size // t)
    ds_config = read_ds_config(str(ROOT / f"ds_configs/zero{arguments.stage}.json"), run)
    build_engine(run, run.build_model_config(600), merge_ds_config(ds_config, run, batch, False), world.grid)
    show("DeepSpeed")


if __name__ == "__main__":
    main()
