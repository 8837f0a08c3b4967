"""Tokens, FLOPs and training seconds until a target loss: recipe against recipe, paired by seed.

    python benchmarks/speedrun.py micro modern-micro --seeds 1 2 3 4 --out FILE.json --plot FILE.png
    python benchmarks/speedrun.py micro "micro --optimizer.kind muon --muon.learning_rate 0.01" --steps 600

A recipe may have its own flags, in quotes; flags for all runs come last. The runs are those of a study
(docs/studies.md) in the folder --runs: recipe after recipe within each seed, so that all see the same
machine. After a stop, the same command with the same --runs resumes; finished runs are not trained again, and
are also read for another target.

--target is a validation loss in nats per token (bits per byte where tokenizers differ); 'mean', the first
recipe's mean final loss, which about half of its runs do not reach; or 'own', its final loss with the
same seed. A run reaches it at its first validation at or below it, or, where there is one before, on the
straight line between the two over tokens. A curve that flattens lies below such lines: validate often
(--validation.every 50).

FLOPs are tokens x the model's training FLOPs per token, without the optimizer's. Seconds are those of
training in metrics.jsonl: compilation is in them, validations and checkpoints are not. A run that does not
reach the target is named as censored, and is in no mean, ratio or interval of what reaching it takes. Ratios
are geometric means over seeds with a 95 % t-interval on the log ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.helpers import MAIN_FLAGS, parser_of, say, write  # noqa: E402
from model.errors import UserError, quote  # noqa: E402
from pretrain.config.command_line import CommandParser, parse_command_line  # noqa: E402
from pretrain.metrics.file import encode  # noqa: E402
from pretrain.runtime.command import run_command  # noqa: E402
from pretrain.study.planned import Study  # noqa: E402
from pretrain.study.planning import OF_A_STUDY, parse_study  # noqa: E402
from pretrain.study.results import RunResult, check_settings, load_results  # noqa: E402
from pretrain.study.running.run import run_study  # noqa: E402
from pretrain.study.statistics.paired import mean_of  # noqa: E402
from pretrain.study.summaries import Sample, View, build_view  # noqa: E402
from pretrain.utils.format import align_columns, human_number  # noqa: E402
from pretrain.utils.plotting import count_axis, save_figure  # noqa: E402

COSTS = ("tokens", "FLOPs", "seconds")
NOT_HERE = re.compile(rf"--({'|'.join([*sorted(OF_A_STUDY), 'config', 'print_config', 'plot_lr'])})(=|$)")


def speedrun(arguments: list[str]) -> int:
    """Train what is missing, then print what the runs show; the exit code.

    Raises:
        UserError: bad input, runs that cannot be compared, or ones of the folder with other settings.
    """
    options, flags = _parser().parse_known_args(arguments)
    if options.plot and options.plot.suffix != ".png":
        raise UserError(f"plot: {quote(str(options.plot))} is not valid; give a file that ends with .png")
    target = _target(options.target)
    folder = options.runs or Path("runs") / f"speedrun-{time.strftime('%Y%m%d-%H%M%S')}"
    study = study_of_recipes(options.recipes, options.seeds, flags, folder)
    try:
        check_settings(study)
    except UserError as error:
        raise UserError(str(error).replace("--out", "--runs")) from None
    with contextlib.redirect_stdout(sys.stderr):
        if code := run_study(study):
            return code
    view = build_view(study, load_results(study))
    results = read(view, targets_of(view, target))
    print("\n".join(lines(results, target)))
    write(options.out, encode(results))
    if options.plot:
        draw(results, options.plot)
        say(f"wrote {options.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, MAIN_FLAGS, CommandParser)
    add = parser.add_argument
    add("recipes", nargs="+", metavar="RECIPE", help="a recipe, or one with flags, in quotes")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4], metavar="N", help="default: 1 2 3 4")
    add("--target", default="mean", metavar="LOSS", help="a loss, 'mean' (default) or 'own': see above")
    add("--runs", type=Path, metavar="FOLDER", help="of the runs (default: runs/speedrun-TIME)")
    add("--plot", type=Path, metavar="FILE.png", help="draw loss against tokens and against seconds")
    return parser


def _target(text: str) -> float | str:
    """A loss, or a word that stands for one."""
    if text in ("mean", "own"):
        return text
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise UserError(f"target: {quote(text)} is not valid; give a loss above 0 such as 3.9, 'mean' or 'own'")


def study_of_recipes(recipes: Sequence[str], seeds: list[int], flags: list[str], folder: Path) -> Study:
    """The study that trains every recipe with every seed in *folder*; the first is the baseline.

    Raises:
        UserError: an unknown recipe, flag or value, a recipe or seed given twice.
    """
    variants: dict[str, Any] = {}
    ds_configs = set()
    for text in recipes:
        try:
            recipe, *own = shlex.split(text)
        except ValueError:  # a quotation mark without its second, or nothing
            raise UserError(f"recipe: {quote(text)} is not valid; give a name, then flags") from None
        if found := next(filter(NOT_HERE.match, [*own, *flags]), None):
            raise UserError(f"{found.split('=')[0]}: not a flag of these runs; leave it out")
        command = parse_command_line(["--config", recipe, *flags, *own])
        name = re.sub(r"[^\w.=+-]+", "_", " ".join([Path(recipe).stem, *own]).replace(" --", " "))
        if name in variants:
            raise UserError(f"recipe: {quote(text)} is given twice; give each once")
        settings = command.run.to_dict().items()
        variants[name] = {key: value for key, value in settings if key not in OF_A_STUDY}
        ds_configs.add(command.ds_config)
    if len(ds_configs) > 1:
        raise UserError(f"ds_config: {', '.join(sorted(ds_configs))}; give one, for all recipes")
    file = {
        "title": "Speedrun",
        "seeds": seeds,
        "ds_config": ds_configs.pop(),
        "baseline": next(iter(variants)),
        "variants": variants,
    }
    study = parse_study(yaml.safe_dump(file, sort_keys=False), folder.name, folder)
    if growing := next((run.variant for run in study.runs if run.run.growth.active), None):
        raise UserError(f"recipe: {growing}: its heads grow, so FLOPs per token change; give another")
    return study


def targets_of(view: View, target: float | str) -> dict[int, float]:
    """The loss to be reached with each seed."""
    finals = view.summaries[0].values
    losses = dict(finals)
    if target != "own":
        losses = dict.fromkeys(finals, mean_of(finals.values()) if isinstance(target, str) else target)
    if not all(map(math.isfinite, losses.values())):
        raise UserError(
            f"target: {target!r} is {min(losses.values())}: a run of {view.summaries[0].variant} diverged; "
            "give a loss"
        )
    return losses


def series(run: RunResult, key: str) -> dict[int, float]:
    """The values of *key* by tokens, in order."""
    return {row["tokens"]: row[key] for row in run.rows if key in row and "tokens" in row}


def tokens_to_reach(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Tokens at which a loss is at or below *target* for the first time; None if it never is.

    Args:
        curve: tokens and loss of each validation, in order. Between two, the loss is taken to be a straight
            line.
            Before the first one nothing is known: a curve that begins below the target reaches it there.
    """
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (early, above), (late, below) in pairwise(curve):
        if below <= target:
            # After a loss that is not finite there is no line.
            share = (above - target) / (above - below) if math.isfinite(above) else 1.0
            return early + (late - early) * share
    return None


def validations(run: RunResult, loss: str) -> list[tuple[int, float, float]]:
    """Tokens, training seconds and loss of each validation."""
    clock = series(run, "seconds")
    return [(tokens, clock[tokens], value) for tokens, value in series(run, loss).items()]


def cost(run: RunResult, loss: str, target: float) -> dict[str, float] | None:
    """Tokens, FLOPs and training seconds until the *loss* of a run is at *target*; None: not reached."""
    tokens = tokens_to_reach(list(series(run, loss).items()), target)
    if tokens is None:
        return None
    assert run.model_config is not None, "a finished run has a checkpoint"
    clock = series(run, "seconds")
    seconds = float(np.interp(tokens, [0, *clock], [0.0, *clock.values()]))
    return {"tokens": tokens, "FLOPs": tokens * run.model_config.flops_per_token(), "seconds": seconds}


def read(view: View, targets: Mapping[int, float]) -> dict[str, Any]:
    """Every value, as written to --out; what is not known or not reached is None."""
    recipes: dict[str, Any] = {}
    loss = "val_bpb" if view.measure == "val_bpb" else "val_loss"
    base: dict[str, Sample] = {}
    """Logarithms of the first recipe's costs."""
    for summary in view.summaries:
        runs: dict[int, dict[str, Any]] = {}
        for run in summary.finished:
            seed = run.planned.seed
            reached = cost(run, loss, targets[seed])
            curve = {"final_loss": summary.values[seed], "validations": validations(run, loss)}
            runs[seed] = {"reached": bool(reached), **(reached or dict.fromkeys(COSTS)), **curve}
        found: dict[str, Any] = {"runs": runs}
        for key in COSTS:
            values = Sample({seed: run[key] for seed, run in runs.items() if run["reached"]})
            logarithms = Sample({seed: math.log(value) for seed, value in values.items()})
            ratio = logarithms.subtract(base.setdefault(key, logarithms))
            found[key] = {"mean": values.mean, "count": len(values), "log_ratio": _numbers(ratio)}
        difference = _numbers(summary.differences)
        found["final_loss"] = {"mean": summary.values.mean, "count": len(runs), "difference": difference}
        recipes[summary.variant] = found
    return {"loss": loss, "targets": dict(targets), "notes": view.caveats, "recipes": recipes}


def lines(results: Mapping[str, Any], target: float | str) -> list[str]:
    """The target, the table, and every run that did not reach the target."""
    recipes, losses = results["recipes"], sorted(set(results["targets"].values()))
    first = next(iter(recipes))
    meant = {"mean": f": the mean final loss of {first}", "own": f": the final losses of {first}, by seed"}
    shown_losses = " to ".join(f"{loss:.4f}" for loss in dict.fromkeys((losses[0], losses[-1])))
    rows = [("", "recipe", "runs", "mean", f"against {first} [95 %]", "pairs")]
    for key in (*COSTS, "final_loss"):
        for name, found in recipes.items():
            mean = found[key]["mean"]
            number = "not reached" if mean is None else human_number(mean) if key in COSTS else f"{mean:.4f}"
            against, pairs = _against(found[key]) if name != first else ("", "")
            count = f"{found[key]['count']}/{len(found['runs'])}"
            rows.append((key.replace("_", " "), name, count, number, against, pairs))
    told = [f"note     {note}" for note in results["notes"]]
    for name, found in recipes.items():
        for seed, run in found["runs"].items():
            curve, what = run["validations"], f"{name}, seed {seed}:"
            if not run["reached"]:
                lowest = min(loss for *_, loss in curve)
                told.append(
                    f"censored {what} not reached in {curve[-1][0]:,} tokens (lowest {lowest:.4f}); the "
                    "recipe's means and ratios leave it out, which favours it"
                )
            elif run["tokens"] == curve[0][0]:
                told.append(f"early    {what} reached by its first validation, perhaps before")
    head = f"target   {results['loss']} {shown_losses}{meant.get(str(target), '')}"
    return [head, *align_columns(rows, {0, 1, 4}), *told]


def _numbers(values: Sample) -> dict[str, Any]:
    found = values.interval
    return {"values": values, "mean": values.mean, "interval": asdict(found) if found else None}


def _against(found: Mapping[str, Any]) -> tuple[str, str]:
    """The ratio or difference with its interval, as far as known, and the number of pairs."""
    is_ratio = "log_ratio" in found
    compared = found["log_ratio" if is_ratio else "difference"]
    if not compared["values"]:
        return "", "0"
    interval = compared["interval"] or {}
    numbers = [compared["mean"], *(interval[key] for key in ("low", "high") if interval)]
    mean, *bounds = (f"{math.exp(number):.3f}" if is_ratio else f"{number:+.4f}" for number in numbers)
    between = f" [{', '.join(bounds)}]" if bounds else ""
    return f"{'x ' if is_ratio else ''}{mean}{between}", str(len(compared["values"]))


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the validation loss of every run against tokens and against seconds, and the targets."""
    with save_figure(path, "plot", 1, 2, size=(11, 4.5), dpi=120, sharey=True) as (_, axes):
        for index, (name, found) in enumerate(results["recipes"].items()):
            for number, run in enumerate(found["runs"].values()):
                *places, losses = zip(*run["validations"], strict=True)
                for axis, place in zip(axes, places, strict=True):
                    axis.plot(place, losses, f"C{index}.-", linewidth=1, label="" if number else name)
        for axis in axes:
            for target in set(results["targets"].values()):
                axis.axhline(target, color="grey", linestyle="--", linewidth=0.8)
        axes[0].set(xlabel="tokens", ylabel=results["loss"])
        axes[1].set(xlabel="seconds of training")
        axes[0].legend()
        count_axis(axes[0].xaxis)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a run failed, 75 or 130 after a request to stop, else as run_command."""
    codes = [0]
    return run_command(lambda given: codes.append(speedrun(given)), arguments) or codes[-1]


if __name__ == "__main__":
    sys.exit(main())
