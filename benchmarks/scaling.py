"""Tokens per second of the trainer against context, layers, vocabulary, accumulation, and ranks on gloo.

    python benchmarks/scaling.py --out scaling.json       # every sweep, for an idle machine: about an hour
    python benchmarks/scaling.py --context --layers --vocabulary --accumulation --ranks 1x2 tp2 --rounds 15
    python benchmarks/scaling.py --context --layers --vocabulary --accumulation --ranks dp2 cp2 tp2 \\
        --length 4096

A sweep changes one thing of the model of --shape, whose layers follow its prism schedule. All points train
the same number of tokens a step. A point is the trainer of pretrain/main.py in separate processes, which
benchmarks/throughput_session.py runs; the points of a sweep take turns of a few steps, so that a machine
whose speed drifts slows all of them. Medians of the rounds are compared with the sweep's first point. A flag
without values leaves its sweep out.

Of ranks, 1x2 is one rank with two threads and 1x1 one with one; dp, tp and cp are data-, tensor- and
context-parallel ranks with one thread each. Tensor parallelism over two ranks is to keep 70 % of the speed
that one rank has with the same two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.blocks import block
from model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import throughput  # noqa: E402
from benchmarks.helpers import parser_of, rank_variables, run_main, say, write  # noqa: E402
from model.heads import parse_heads  # noqa: E402

SWEEPS = {
    "context": [256, 512, 1024, 2048, 4096, 8192],
    "layers": [3, 6, 12, 24],
    "vocabulary": [1024, 4096, 16384, 32768],
    "accumulation": [1, 2, 4, 8],
}
# Data-, tensor- and context-parallel ranks, threads of each.
RANKS = {
    "1x2": (1, 1, 1, 2),
    "1x1": (1, 1, 1, 1),
    "dp2": (2, 1, 1, 1),
    "tp2": (1, 2, 1, 1),
    "cp2": (1, 1, 2, 1),
    "tp4": (1, 4, 1, 1),
}
TARGET = 0.7  # of tp2, in speed of 1x2


@dataclass(frozen=True)
class Point:
    """What one entry of a sweep trains, and on how many ranks."""

    context: int
    layers: int
    vocabulary: int
    accumulation: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    threads: int | None = None
    """Of each rank; None is what pretrain/main.py takes."""

    def micro_batch(self, tokens: int) -> int:
        """Sequences of a micro-batch; 0 where *tokens* cannot be shared evenly."""
        rows, rest = divmod(tokens, self.context * self.accumulation * self.data_parallel)
        return 0 if rest else rows

    def model(self, shape: throughput.Shape) -> ModelConfig:
        """The model: the schedule of *shape* over more or fewer layers."""
        heads = parse_heads(shape.prism)
        return block(
            "llama",
            vocab_size=self.vocabulary,
            context_length=self.context,
            d_model=shape.d_model,
            ffn_width=8 * shape.d_model // 3,
            heads=tuple(heads[layer * len(heads) // self.layers] for layer in range(self.layers)),
        )


def sweeps(options: argparse.Namespace, shape: throughput.Shape) -> dict[str, dict[str, Point]]:
    """The points of every sweep that was asked for."""
    base = Point(options.length or shape.context, shape.layers, shape.vocab_size)
    found = {
        name: {str(value): dataclasses.replace(base, **{name: value}) for value in getattr(options, name)}
        for name in SWEEPS
    }
    found["ranks"] = {
        name: dataclasses.replace(
            base,
            **dict(
                zip(("data_parallel", "tensor_parallel", "context_parallel", "threads"), ranks, strict=True)
            ),
        )
        for name, ranks in RANKS.items()
        if name in options.ranks
    }
    return {name: points for name, points in found.items() if points}


class Group:
    """The ranks of a point, which stay between their turns."""

    def __init__(self, name: str, point: Point, options: argparse.Namespace, folder: str) -> None:
        model = point.model(throughput.SHAPES[options.shape]).to_json()
        micro_batch = point.micro_batch(options.tokens)
        (Path(folder) / "model.json").write_text(json.dumps(model))
        threads = [f"--threads={point.threads}"] if point.threads else []
        batch = [f"--global_batch_tokens={options.tokens}"]
        batch += [f"--{name}={getattr(point, name)}" for name in ("tensor_parallel", "context_parallel")]
        request = throughput.session_request(options, model, micro_batch) | {
            "program": "ours",
            "folder": folder,
            "flags": [*batch, *threads, *options.flags],
        }
        ranks = rank_variables(point.data_parallel * point.tensor_parallel * point.context_parallel)
        self.ranks = [throughput.Contender(name, request, variables) for variables in ranks]

    def turn(self, steps: int) -> dict[str, Any]:
        """Rank 0's measurements of so many steps."""
        for rank in self.ranks:
            rank.ask(str(steps))
        answers = [rank.answer() for rank in self.ranks]
        return answers[0]

    def end(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.end()


@contextlib.contextmanager
def started(points: dict[str, Point], options: argparse.Namespace) -> Iterator[dict[str, Group]]:
    """The groups of a sweep after their first steps, made one after the other."""
    groups: dict[str, Group] = {}
    with contextlib.ExitStack() as stack:
        for name, point in points.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            groups[name] = Group(name, point, options, folder)
            stack.callback(groups[name].end)
            for rank in groups[name].ranks:
                rank.wait()
        yield groups


def measure(name: str, points: dict[str, Point], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The measurements of a sweep's points."""
    turns: dict[str, list[dict[str, Any]]] = {key: [] for key in points}
    with started(points, options) as groups:
        for number in range(options.rounds):
            for key, group in groups.items():
                turns[key].append(group.turn(options.steps))
                rate = options.tokens / turns[key][-1]["seconds"]
                say(f"{name} {key:<8} round {number + 1}/{options.rounds}{rate:>12,.0f} tokens/s")
    rows = []
    for key, point in points.items():
        rates = [options.tokens / turn["seconds"] for turn in turns[key]]
        rows.append(
            {
                "point": key,
                **dataclasses.asdict(point),
                "micro_batch": point.micro_batch(options.tokens),
                "tokens_per_second": statistics.median(rates),
                "all": rates,
                "loss": turns[key][-1]["loss"],
            }
        )
    return rows


def table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each point."""
    first = rows[0]["tokens_per_second"]
    return [
        f"| {name} | tokens/s | slowest – fastest | of {rows[0]['point']} | loss |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {row['point']} | {row['tokens_per_second']:,.0f} | {min(row['all']):,.0f} – "
            f"{max(row['all']):,.0f} "
            f"| {row['tokens_per_second'] / first:.0%} | {row['loss']:.4f} |"
            for row in rows
        ),
        "",
    ]


def main() -> None:
    """Measure, print, write."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=throughput.SHAPES, default="tiny")
    for name, values in SWEEPS.items():
        parser.add_argument(f"--{name}", type=int, nargs="*", default=values)
    parser.add_argument("--length", type=int, help="context length of the other sweeps (the shape's)")
    parser.add_argument("--ranks", nargs="*", choices=RANKS, default=list(RANKS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    throughput.add_session_flags(parser)
    options = parser.parse_args()
    for name in ("rounds", "steps", "tokens", *SWEEPS):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                parser.error(f"{name}: {number} is not valid; give at least 1")
    asked = sweeps(options, throughput.SHAPES[options.shape])
    for name, points in asked.items():
        for key, point in points.items():
            if not point.micro_batch(options.tokens):
                least = point.context * point.accumulation * point.data_parallel
                parser.error(
                    f"tokens: {options.tokens} is not valid for {name} {key}; give a multiple of {least}"
                )
    results: dict[str, Any] = {"options": vars(options), "sweeps": {}}
    for name, points in asked.items():
        try:
            rows = measure(name, points, options)
        except throughput.Failed as error:
            raise SystemExit(f"{name}: {error}") from None
        results["sweeps"][name] = rows
        write(options.out, results)  # after every sweep: what is cut off later has these
        print("\n".join(table(name, rows)), flush=True)
        rates = {row["point"]: row["tokens_per_second"] for row in rows}
        if {"1x2", "tp2"} <= rates.keys():
            print(f"tp2 / 1x2: {rates['tp2'] / rates['1x2']:.0%}; the target is {TARGET:.0%}\n", flush=True)


if __name__ == "__main__":
    run_main(main)
