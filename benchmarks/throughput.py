"""Tokens per second of the whole training step: this trainer compared with transformers' Llama and nanoGPT,
which take turns.

    python benchmarks/throughput.py --nanogpt CHECKOUT          # the shape of docs/performance.md, here
    python benchmarks/throughput.py --shape 124m --out gpu.json # on a GPU: 124m, 354m, 757m
    python benchmarks/throughput.py --contenders prism uniform config7 --rounds 15

A step is forward, backward, clipping and the optimizer's update on real text; this trainer's is that of
pretrain/main.py, DeepSpeed engine, data, metrics and stop vote included. Every contender is a separate
process (benchmarks/throughput_session.py). On a CPU all of them stay, and one at a time makes a few steps
while the others are stopped, so that a machine whose speed drifts slows all of them; on a GPU, whose memory
they would share, each round starts them again. Bare matrix products in the shapes of the model are also
timed: the fastest is the limit that shares refer to.

nanoGPT is not part of this project: give the folder of a checkout. What is compared with it is our model in
GPT-2's architecture; with transformers' Llama, ours in Llama's. Their best mode is the faster of eager and
compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.blocks import block
from model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.helpers import parser_of, run_main, say, write  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """What every contender trains."""

    d_model: int
    layers: int
    heads: str
    """Of the uniform models."""
    prism: str
    """Head schedule of the contender "prism"."""
    context: int
    micro_batch: int
    vocab_size: int
    steps: int
    """Steps of a turn."""
    config7: str | None = None
    """Head schedule of the contender "config7": that of the preset config-7-124m, or one with its head
    dims."""

    def model(self, kind: str, heads: str | None = None) -> ModelConfig:
        """The model in an architecture of this project; Llama's SwiGLU has as many parameters as GPT-2's
        MLP."""
        width = 4 * self.d_model if kind == "gpt2" else 8 * self.d_model // 3
        return block(
            kind,
            vocab_size=self.vocab_size,
            context_length=self.context,
            d_model=self.d_model,
            ffn_width=width,
            heads=heads or self.heads,
        )


SHAPES = {
    "rehearsal": Shape(48, 3, "4x3", "1,2,4", 32, 2, 512, 1, "1,2,4"),  # of the commands, not of any speed
    "small": Shape(384, 6, "6x6", "2,3,4,6x3", 512, 8, 8192, 2, "1,2,4,6x3"),
    "tiny": Shape(192, 6, "6x6", "1,2,3,4,6x2", 256, 16, 4096, 4),
    "124m": Shape(768, 12, "12x12", "3x2,6x2,8x2,12x6", 1024, 16, 50257, 20, "2x2,4x2,8x2,12x6"),
    "354m": Shape(1024, 24, "16x24", "4x3,8x3,16x18", 1024, 16, 50257, 10),
    "757m": Shape(1536, 24, "16x24", "6x3,12x3,16x18", 1024, 8, 50257, 10),
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "ours": {"program": "ours", "kind": "llama"},
    "ours-compiled": {"program": "ours", "kind": "llama", "compile": True},
    "ours-gpt2": {"program": "ours", "kind": "gpt2"},
    "ours-gpt2-compiled": {"program": "ours", "kind": "gpt2", "compile": True},
    "uniform": {"program": "ours", "kind": "llama", "compile": "auto"},
    "prism": {"program": "ours", "kind": "llama", "compile": "auto", "schedule": "prism"},
    "config7": {"program": "ours", "kind": "llama", "compile": "auto", "schedule": "config7"},
    "llama": {"program": "transformers", "kind": "llama"},
    "llama-compiled": {"program": "transformers", "kind": "llama", "compile": True},
    "nanogpt": {"program": "nanogpt", "kind": "gpt2"},
    "nanogpt-compiled": {"program": "nanogpt", "kind": "gpt2", "compile": True},
    "products": {"program": "products", "kind": "llama"},
}
DEFAULT = ["ours", "ours-compiled", "ours-gpt2", "ours-gpt2-compiled", "llama", "llama-compiled"]


@dataclass
class Result:
    """What one contender did."""

    name: str
    flops_per_token: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of a step, for every round."""
    tokens: int = 0
    """Tokens of a step."""
    first_step_seconds: float = 0.0
    """From the command to the end of the first step."""
    peak_bytes: int = 0
    """The most memory since its imports; on a GPU torch's peak."""
    loss: float = 0.0
    """After the last round."""

    @property
    def tokens_per_second(self) -> float:
        """Of the median round."""
        return self.tokens / statistics.median(self.seconds)


class Failed(RuntimeError):
    """A contender's process ended without an answer."""


class Contender:
    """One process, which trains when it is asked to. *ready* says how its first step went, once wait has
    returned."""

    def __init__(
        self, name: str, request: dict[str, Any], variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        # The same for every contender: only one runs at a time, so its threads may spin while they wait.
        defaults = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "active"}
        environment = defaults | os.environ | dict(variables or {})
        self.began = time.time()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks/throughput_session.py"), json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.ready: dict[str, Any] = {}

    def wait(self) -> Contender:
        """Wait for its first step."""
        self.ready = self.answer()
        return self

    def ask(self, what: str) -> None:
        """Send a line; answer returns what it says to it."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which answer reports
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; raises Failed if the process ends without one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"throughput"'):
                return dict(json.loads(line)["throughput"])
        self.errors.seek(0)
        raise Failed(f"{self.name}: ended without an answer\n{self.errors.read()[-3000:]}")

    def pause(self) -> None:
        """Stop the process until it is asked again, so that its waiting threads leave the cores to others."""
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def session_request(options: argparse.Namespace, model: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """What every program of throughput_session.py is told."""
    return {
        "compile": False,
        "model": model,
        "micro_batch": micro_batch,
        "data_root": options.data_root,
        "precision": options.precision,
    }


def measure(
    options: argparse.Namespace, shape: Shape, names: list[str]
) -> Iterator[tuple[dict[str, Result], float, set[str]]]:
    """Let the contenders take turns.

    Yields:
        After every round: the results so far, the highest rate of bare products in FLOP/s, and the names of
        those that failed, which take no further part.
    """
    requests, results = {}, {}
    for name in names:
        described = CONTENDERS[name]
        schedule = described.get("schedule")
        model = shape.model(described["kind"], getattr(shape, schedule) if schedule else None)
        request = session_request(options, model.to_json(), shape.micro_batch)
        requests[name] = request | {"nanogpt": options.nanogpt, "flags": options.flags} | described
        results[name] = Result(name, model.flops_per_token())
    limit = 0.0
    failed: set[str] = set()
    resident: dict[str, Contender] = {}

    def turn(number: int, name: str) -> None:
        nonlocal limit
        contender = resident.get(name)
        if contender is None:
            contender = resident[name] = Contender(name, requests[name])
            contender.wait()
        contender.ask(str(options.steps or shape.steps))
        result, answer = results[name], contender.answer()
        contender.pause()
        if contender.ready["device"] == "cuda":
            resident.pop(name).end()
        if name == "products":
            limit = max(limit, answer["flops"])
            return
        result.first_step_seconds = result.first_step_seconds or contender.ready["at"] - contender.began
        result.seconds.append(answer["seconds"])
        result.tokens, result.loss = answer["tokens"], answer["loss"]
        result.peak_bytes = max(result.peak_bytes, answer["peak_bytes"])
        say(
            f"round {number + 1}/{options.rounds}  {name:<20}{result.tokens / answer['seconds']:>12,.0f} "
            "tokens/s"
        )

    try:
        for number in range(options.rounds):
            for name in names:
                if name in failed:
                    continue
                try:
                    turn(number, name)
                except Failed as error:  # out of memory, or a package is missing: the others continue
                    failed.add(name)
                    say(str(error))
                    resident.pop(name).end()
            yield {name: result for name, result in results.items() if result.seconds}, limit, failed
    finally:  # also after Ctrl-C or a time limit: none may run during what comes next
        for contender in resident.values():
            contender.end()


def table(results: dict[str, Result], limit: float) -> list[str]:
    """Markdown: a row for each contender."""
    lines = [
        "| contender | tokens/s | slowest – fastest | of the products' rate | first step, s | memory, MB | "
        "loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results.values():
        rates = sorted(result.tokens / seconds for seconds in result.seconds)
        share = result.tokens_per_second * result.flops_per_token / limit if limit else float("nan")
        lines.append(
            f"| {result.name} | {result.tokens_per_second:,.0f} | {rates[0]:,.0f} – {rates[-1]:,.0f} | "
            f"{share:.0%} "
            f"| {result.first_step_seconds:.1f} | {result.peak_bytes / 1e6:,.0f} | {result.loss:.4f} |"
        )
    return lines


def ratios(results: dict[str, Result]) -> dict[str, list[float]]:
    """Speed of one contender over another's in the same round; ours and theirs each in the better of its
    modes."""

    def best(*names: str) -> Result | None:
        present = [results[name] for name in names if name in results]
        return max(present, key=lambda result: result.tokens_per_second, default=None)

    pairs = {
        "ours / transformers' Llama": (best("ours", "ours-compiled"), best("llama", "llama-compiled")),
        "ours / nanoGPT": (best("ours", "ours-compiled"), best("nanogpt", "nanogpt-compiled")),
        "ours as GPT-2 / nanoGPT": (
            best("ours-gpt2", "ours-gpt2-compiled"),
            best("nanogpt", "nanogpt-compiled"),
        ),
        "prism / uniform": (best("prism"), best("uniform")),
        "config7 / uniform": (best("config7"), best("uniform")),
    }
    return {
        name: [theirs / mine for mine, theirs in zip(first.seconds, second.seconds, strict=False)]
        for name, (first, second) in pairs.items()
        if first is not None and second is not None
    }


def interval(values: list[float]) -> str:
    """The mean and its 95 % interval (Student's t); without scipy the mean and the extremes."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    try:
        from scipy.stats import t
    except ImportError:
        return f"{mean:.3f}, {min(values):.3f} to {max(values):.3f}"
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that go to every throughput_session.py, and --out."""
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument(
        "--data_root", default="data", help="where built-in corpora are, or are prepared once"
    )
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="last: more flags of pretrain/main.py"
    )


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    default = f"default: {' '.join(DEFAULT)}, products, and nanoGPT's two with --nanogpt"
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help=default)
    parser.add_argument("--nanogpt", metavar="FOLDER", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a turn (default: the shape's)")
    add_session_flags(parser)
    options = parser.parse_args()
    theirs = ["nanogpt", "nanogpt-compiled"] if options.nanogpt else []
    names = options.contenders or [*DEFAULT, *theirs, "products"]
    if options.nanogpt is None and any(name.startswith("nanogpt") for name in names):
        parser.error("nanogpt: give --nanogpt FOLDER, a checkout of nanoGPT")
    if options.nanogpt is not None and not (Path(options.nanogpt) / "model.py").is_file():
        parser.error(f"nanogpt: {options.nanogpt} has no model.py; give the folder of a checkout")
    if options.rounds < 1:
        parser.error(f"rounds: {options.rounds} is not valid; give at least 1")
    shape = SHAPES[options.shape]
    for name in names:
        schedule = CONTENDERS[name].get("schedule")
        if schedule and getattr(shape, schedule) is None:
            have = [key for key, other in SHAPES.items() if getattr(other, schedule) is not None]
            parser.error(
                f"contenders: {name} is not valid with --shape {options.shape}; valid: {', '.join(have)}"
            )
    for results, limit, failed in measure(options, shape, names):
        output = {
            "shape": options.shape,
            "precision": options.precision,
            "limit_flops": limit,
            "ratios": ratios(results),
            "results": {name: dataclasses.asdict(result) for name, result in results.items()},
            "failed": sorted(failed),
        }
        write(options.out, output)  # after every round: what is cut off later has these
    print("\n".join(table(results, limit)))
    if limit:
        print(f"\nBare matrix products in the model's shapes: {limit / 1e9:,.1f} GFLOP/s, the best of all.")
    for name, values in ratios(results).items():
        print(f"{name}: {interval(values)} ({len(values)} rounds)")
    if failed:
        raise SystemExit(f"failed: {', '.join(sorted(failed))}; see above")


if __name__ == "__main__":
    run_main(main)
