"""Tokens, FLOPs and seconds until a target loss, recipe against recipe, on the same text and seeds.

    python benchmarks/speedrun.py RECIPE RECIPE … [--seeds 1 2 3 4] [--target 3.9] [FLAGS of main.py]

A recipe is a name (python pretrain/main.py --help) or a YAML file. Each seed trains all of them, one after
the other. A finished run is not repeated. The target is a validation loss; by default the highest at the end
of the first recipe's runs, which all of them reach. Between two validations the loss is taken as a straight
line over tokens, so validate often (--validation.every). Seconds are those of training alone: tokens divided
by the speed that was logged. A run that ends above the target counts as not reached, and its seed has no
ratio.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from benchmarks.helpers import MAIN_FLAGS, parser_of, say, write  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.errors import UserError, run_command  # noqa: E402
from pretrain.config.command_line import find_recipe, parse_command_line  # noqa: E402
from pretrain.metrics.file import read_metrics  # noqa: E402
from pretrain.study.statistics import Interval, paired_interval, tokens_to_reach  # noqa: E402
from pretrain.utils.parsing import read_json_object  # noqa: E402
from pretrain.utils.plotting import saved_figure  # noqa: E402
from pretrain.utils.tables import aligned  # noqa: E402

AMOUNTS = ("tokens", "FLOPs", "seconds")


@dataclass(frozen=True)
class Curve:
    """The validations of one run."""

    tokens: list[float]
    seconds: list[float]
    losses: list[float]
    flops_per_token: float

    def until(self, target: float) -> tuple[float, float, float] | None:
        """Tokens, FLOPs and seconds until the loss first is at most *target*; None if it never is."""
        tokens = tokens_to_reach(list(zip(self.tokens, self.losses, strict=True)), target)
        if tokens is None:
            return None
        seconds = float(np.interp(tokens, self.tokens, self.seconds))
        return tokens, tokens * self.flops_per_token, seconds


def curve_of(folder: Path) -> Curve:
    """Read a finished run's folder.

    Raises:
        UserError: a figure is not a number, or there is no validation.
    """
    tokens: list[float] = []
    seconds: list[float] = []
    losses: list[float] = []
    spent = done = 0.0
    for row in read_metrics(folder):
        if "tokens_per_second" in row:
            spent += (row["tokens"] - done) / row["tokens_per_second"]
            done = row["tokens"]
        if "val_loss" in row and row["tokens"] > 0:
            tokens.append(row["tokens"])
            seconds.append(spent)
            losses.append(row["val_loss"])
    if not losses:
        raise UserError(f"validation.every: {folder} has no validation loss; give a number of steps")
    newest = (folder / "latest").read_text().strip()
    state = read_json_object(folder / "checkpoints" / newest / "state.json", "runs")
    return Curve(tokens, seconds, losses, ModelConfig.from_json(state["model"]).flops_per_token())


def train(recipe: str, seed: int, runs: Path, flags: Sequence[str]) -> Curve:
    """Train one recipe with one seed, unless that is done.

    Raises:
        UserError: the run failed; its log is named.
    """
    name = f"{Path(recipe).stem}-s{seed}"
    folder, log = runs / name, runs / f"{name}.log"
    arguments = ["--config", recipe, *flags, "--seed", str(seed), "--runs_dir", str(runs), "--name", name]
    steps = parse_command_line(arguments).run.steps
    rows = read_metrics(folder)
    if not rows or rows[-1]["step"] < steps or not (folder / "latest").exists():
        say(f"training {name}: {steps:,} steps")
        runs.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            command = [sys.executable, str(ROOT / "pretrain" / "main.py"), *arguments]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        if code:
            raise UserError(f"runs: {name} ended with exit code {code}; {log} says why")
    curve = curve_of(folder)
    say(f"finished {name}: validation loss {curve.losses[-1]:.4f}")
    return curve


def ratios(curves: dict[str, list[Curve]], recipe: str, target: float) -> list[Interval]:
    """Tokens, FLOPs and seconds of a recipe's runs over those of the first recipe with the same seed: the
    logarithm's mean and interval, over the seeds with which both reach *target*."""
    first = next(iter(curves))
    found = [(a.until(target), b.until(target)) for a, b in zip(curves[recipe], curves[first], strict=True)]
    both = [(a, b) for a, b in found if a is not None and b is not None]
    return [paired_interval([math.log(a[k] / b[k]) for a, b in both]) for k in range(len(AMOUNTS))]


def table(curves: dict[str, list[Curve]], target: float) -> list[str]:
    """Lines with one row a recipe."""
    header = ("recipe", "reached", *AMOUNTS, *(f"ratio of {name}" for name in AMOUNTS), "final loss")
    rows: list[tuple[str, ...]] = [header]
    for recipe, runs in curves.items():
        reached = [found for run in runs if (found := run.until(target))]
        amounts = [f"{fmean(run[k] for run in reached):.3g}" if reached else "-" for k in range(3)]
        shown = [
            f"{math.exp(x.mean):.3f} [{math.exp(x.low):.3f}, {math.exp(x.high):.3f}]" if x.count else "-"
            for x in ratios(curves, recipe, target)
        ]
        final = f"{fmean(run.losses[-1] for run in runs):.4f}"
        rows.append((Path(recipe).stem, f"{len(reached)} of {len(runs)}", *amounts, *shown, final))
    return aligned(rows, left=(0,))


def main(arguments: list[str]) -> None:
    """Train what is missing, compare and print."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--target", type=float, help="validation loss, in nats per token")
    parser.add_argument("--runs", type=Path, default=Path("runs/speedrun"), help="folder of the runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw loss over tokens and seconds")
    options, flags = parser.parse_known_args(arguments)
    if options.target is not None and not math.isfinite(options.target):
        raise UserError(f"target: {options.target} is not a loss; give a number, such as 3.9")
    for name in ("recipes", "seeds"):
        given = getattr(options, name)
        if len(set(given)) < len(given):
            raise UserError(f"{name}: one is given twice; give each once")
    for recipe in options.recipes:
        find_recipe(recipe, "recipes")
    curves: dict[str, list[Curve]] = {recipe: [] for recipe in options.recipes}
    for seed in options.seeds:
        for recipe in options.recipes:
            curves[recipe].append(train(recipe, seed, options.runs, flags))
    target = options.target
    if target is None:
        target = max(run.losses[-1] for run in curves[options.recipes[0]])
    print(f"target: a validation loss of {target:.4f}; intervals of 95 %, paired by seed")
    print("\n".join(table(curves, target)))
    if options.plot:
        _draw(options.plot, curves, target)
    figures: dict[str, Any] = {
        recipe: [
            {"seed": seed, "losses": run.losses, "tokens": run.tokens, "until": run.until(target)}
            | {"seconds": run.seconds}
            for seed, run in zip(options.seeds, runs, strict=True)
        ]
        for recipe, runs in curves.items()
    }
    write(options.out, {"target": target, "flags": flags, "recipes": figures})


def _draw(path: Path, curves: dict[str, list[Curve]], target: float) -> None:
    with saved_figure(path, "plot", 1, 2, size=(9.0, 3.6), dpi=150, sharey=True) as (_, axes):
        for color, (recipe, runs) in enumerate(curves.items()):
            for number, run in enumerate(runs):
                label = Path(recipe).stem if number == 0 else None
                axes[0].plot([t / 1e6 for t in run.tokens], run.losses, f"C{color}", label=label)
                axes[1].plot(run.seconds, run.losses, f"C{color}")
        for axis, label in zip(axes, ("tokens (millions)", "seconds of training"), strict=True):
            axis.axhline(target, color="gray", linewidth=0.8, linestyle=":")
            axis.set_xlabel(label)
        axes[0].set_ylabel("validation loss (nats)")
        axes[0].legend()


if __name__ == "__main__":
    sys.exit(run_command(main, None))
