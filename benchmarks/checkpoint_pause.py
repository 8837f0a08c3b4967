"""How long a checkpoint stops the training: written at once, and beside the training.

    python benchmarks/checkpoint_pause.py [--model prism-tiny] [--rounds 5] [--stage 2]

Both ways take turns on one engine in one process, each checkpoint followed by steps until it is finished. Pause: from
the call to its return. Prints the table that stands in docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pretrain.runtime.environment import settle_waiting_threads  # noqa: E402


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="prism-tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2)
    options = parser.parse_args()
    settle_waiting_threads()

    import torch

    from pretrain.checkpoint.state import TrainingState
    from pretrain.checkpoint.store import CheckpointStore
    from pretrain.config.command_line import parse_command_line
    from pretrain.engine.build import build_engine
    from pretrain.engine.ds_config import merge_ds_config
    from pretrain.engine.ds_config_check import read_ds_config
    from pretrain.engine.memory.micro_batch import plan_batch
    from pretrain.engine.patches import prepare_deepspeed
    from pretrain.runtime.world import start_world

    prepare_deepspeed()
    world = start_world(None, False)
    run = parse_command_line(["--model", options.model, "--precision", "fp32"]).run
    model = run.build_model_config()
    plan = plan_batch(2 * model.context_length, 2, model, 1, 1 << 34, world.device.type)
    settings = read_ds_config(str(ROOT / f"ds_configs/zero{options.stage}.json"))
    engine = build_engine(run, model, merge_ds_config(settings, run, plan, False, model), world.grid)
    tokens = torch.randint(0, model.vocab_size, (2, model.context_length + 1), device=world.device)

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        engine.step()
        return time.perf_counter() - began

    step()
    alone = statistics.median(step() for _ in range(5))
    found: dict[str, list[tuple[float, float, float]]] = {"at once": [], "beside the training": []}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        config = replace(run.checkpoint, keep_last=1)
        store = CheckpointStore(Path(folder), config, world)
        size = 0
        for index in range(2 * options.rounds):
            way = list(found)[index % 2]
            began = time.perf_counter()
            store.begin(engine, TrainingState(step=index + 1), tokenizer, background=way != "at once")
            if way == "at once":
                store.finish()
            pause = time.perf_counter() - began
            steps = []
            while store.writing:
                steps.append(step())
            store.finish()
            whole = time.perf_counter() - began
            found[way].append((pause, whole, statistics.median(steps) if steps else alone))
            size = sum(path.stat().st_size for path in store.path(index + 1).rglob("*") if path.is_file())
    described = f"{options.model}, ZeRO {options.stage}, {size / 2**20:,.0f} MiB a checkpoint"
    print(f"{described}, a step alone {alone * 1e3:,.0f} ms, on {world.device.type}")
    print("| written | pause | until it is safe | a step meanwhile |\n|---|---|---|---|")
    for way, rows in found.items():
        pause, whole, meanwhile = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {way} | {pause * 1e3:,.0f} ms | {whole * 1e3:,.0f} ms | {meanwhile * 1e3:,.0f} ms |")


if __name__ == "__main__":
    main()
