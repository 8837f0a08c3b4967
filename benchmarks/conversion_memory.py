"""Peak memory of pretrain.convert on checkpoints that real ranks wrote, against the weights in fp32.

    python benchmarks/conversion_memory.py       # the table of docs/log/memory.md, minutes on two cores
    python benchmarks/conversion_memory.py --model prism-354m --data data/mine --worlds zero3 zero3_tensor

Each parallel configuration trains one step of the model, saves, and is converted in a new process
(benchmarks/conversion_session.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.helpers import parser_of, run_main, run_ranks, write  # noqa: E402
from model.config import ModelConfig  # noqa: E402


@dataclass(frozen=True)
class World:
    """The ranks that write a checkpoint."""

    words: str
    ranks: int
    stage: int
    tensor_parallel: int = 1
    format: str = "native"


WORLDS = {
    "zero1": World("ZeRO-1, 2 ranks", 2, 1),
    "zero2": World("ZeRO-2, 2 ranks", 2, 2),
    "zero3": World("ZeRO-3, 2 ranks", 2, 3),
    "zero1_tensor": World("ZeRO-1, 2 tensor-parallel ranks", 2, 1, 2),
    "zero3_tensor": World("ZeRO-3, 2 x 2 tensor-parallel ranks", 4, 3, 2),
    "padded": World("ZeRO-2, 2 ranks, to --format llama", 2, 2, format="llama"),
}


def train(world: World, name: str, folder: Path, options: argparse.Namespace) -> Path:
    """Train one step on the ranks of a configuration; the run's folder."""
    values = {
        "config": "micro",
        "ds_config": f"ds_configs/zero{world.stage}.json",
        "model": options.model,
        "data": options.data,
        "architecture.context_length": 256,
        "global_batch_tokens": 512 * world.ranks // world.tensor_parallel,
        "micro_batch": 2,
        "tensor_parallel": world.tensor_parallel,
        "precision": "fp32",
        "steps": 1,
        "validation.every": 0,
        "logging.wandb": "disabled",
        "runs_dir": folder,
        "name": name,
    }
    run_ranks(["pretrain/main.py", *(f"--{flag}={value}" for flag, value in values.items())], world.ranks)
    return folder / name


def measure(run: Path, world: World, out: Path) -> dict[str, int]:
    """Convert in a fresh process; its peaks in bytes, and the bytes of the weights in fp32 (padded ones,
    too)."""
    command = ["benchmarks/conversion_session.py", str(run), str(out), "--format", world.format]
    [printed] = run_ranks(command, 1)
    state = next((run / "checkpoints").glob("step_*/state.json"))
    model = ModelConfig.from_json(json.loads(state.read_text())["model"])
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return json.loads(printed.splitlines()[-1]) | {"weights": max(4 * model.num_parameters(), written)}


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="prism-124m")
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--folder", help="for runs and exports, a few GB (default: a temporary one)")
    options = parser.parse_args()
    results: dict[str, dict[str, int]] = {}
    print("| checkpoint | weights, MB | own memory, MB | ratio | with mapped files, MB | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.worlds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run = train(WORLDS[name], name, Path(folder), options)
            found = measure(run, WORLDS[name], Path(folder) / "hf")
        results[name] = found
        write(options.out, results)
        weights, own, resident = (found[key] for key in ("weights", "own", "resident"))
        print(
            f"| {WORLDS[name].words} | {weights / 1e6:,.0f} | {own / 1e6:,.0f} | {own / weights:.2f} | "
            f"{resident / 1e6:,.0f} | {resident / weights:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
