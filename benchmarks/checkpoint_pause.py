"""How long a checkpoint stops the training: written at once, and in the background.

    python benchmarks/checkpoint_pause.py [--model prism-tiny] [--rounds 5] [--stage 2]

Both ways take turns on one engine in one process, each checkpoint followed by steps until it is finished.
The pause is the time from the call to its return. Prints the table of docs/log/costs.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import parser_of, run_main, write  # noqa: E402
from benchmarks.one_trainer import OneTrainer, trainer_of  # noqa: E402 - before torch
from model.presets import preset  # noqa: E402
from pretrain.checkpoint.state import TrainingState  # noqa: E402
from pretrain.checkpoint.store import CheckpointStore  # noqa: E402


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="prism-tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2)
    options = parser.parse_args()
    flags = ["--precision", "fp32", "--ds_config", str(ROOT / f"ds_configs/zero{options.stage}.json")]
    with trainer_of(preset(options.model), 2, *flags) as one:
        alone, size, found = measure(one, options.rounds)
        device = one.session.world.device.type
    described = f"{options.model}, ZeRO {options.stage}, {size / 2**20:,.0f} MiB a checkpoint"
    print(f"{described}, a step alone {alone * 1e3:,.0f} ms, on {device}")
    print("| written | pause | until it is safe | a step meanwhile |\n|---|---|---|---|")
    for way, rows in found.items():
        pause, whole, meanwhile = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {way} | {pause * 1e3:,.0f} ms | {whole * 1e3:,.0f} ms | {meanwhile * 1e3:,.0f} ms |")
    write(options.out, {"alone": alone, "bytes": size, "found": found})


def measure(one: OneTrainer, rounds: int) -> tuple[float, int, dict[str, list[tuple[float, float, float]]]]:
    """Seconds of a step alone, bytes of a checkpoint, and of each way its pauses, whole times and steps
    meanwhile."""
    engine, session = one.trainer.engine, one.session
    one.step()
    alone = statistics.median(one.seconds(one.step) for _ in range(5))
    found: dict[str, list[tuple[float, float, float]]] = {"at once": [], "in the background": []}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        config = replace(session.run.checkpoint, keep_last=1)
        store = CheckpointStore(Path(folder), config, session.world)
        size = 0
        for index in range(2 * rounds):
            way = list(found)[index % 2]
            began = time.perf_counter()
            state = TrainingState(step=index + 1, model=session.model_config.to_json())
            store.begin(engine, state, tokenizer, background=way != "at once")
            if way == "at once":
                store.finish()
            pause = time.perf_counter() - began
            steps = []
            while store.writing:
                steps.append(one.seconds(one.step))
            store.finish()
            whole = time.perf_counter() - began
            found[way].append((pause, whole, statistics.median(steps) if steps else alone))
            size = sum(path.stat().st_size for path in store.path(index + 1).rglob("*") if path.is_file())
    return alone, size, found


if __name__ == "__main__":
    run_main(main)
