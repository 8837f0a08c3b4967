"""Slowing W_Q and W_K of the upper layers early in training: control and rule, in GPT-2-style and LLaMA-style blocks.

    python benchmarks/upper_qk_experiment.py --out runs/upper_qk [--seeds 1 2 3] [--models gpt2 llama] [--dry_run]

Runs the recipes ``mini``, ``mini-upper_qk`` and ``mini-upper_qk_maturity`` for every model and seed, one after the
other on this machine. Runs of one seed read the same sequences in the same order and begin with the same weights, so
arms are compared pair by pair. The same command goes on after an interruption: finished runs are not repeated. At the
end (or with --report for what is there) it writes OUT/section.md, tables and commands in Markdown, and the diagnostics'
pictures in OUT/plots/MODEL.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.metrics.file import read_metrics
from pretrain.study.statistics import paired_interval

ROOT = Path(__file__).resolve().parents[1]
ARMS = {"control": "mini", "upper_qk": "mini-upper_qk", "upper_qk_maturity": "mini-upper_qk_maturity"}
MEASURES = {
    "lambda_q_initial": "λ_Q from initialisation",
    "lambda_k_initial": "λ_K from initialisation",
    "lambda_q_release": "λ_Q from release",
    "lambda_k_release": "λ_K from release",
    "path_energy": "R/‖X‖², writes below",
    "attention_entropy": "attention entropy, nats",
    "max_probability": "largest attention probability",
    "attention_distance": "attention distance, tokens",
    "logit_spread": "spread of the logits",
}


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/upper_qk"), help="runs, plots and section.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--data_root", default="data", help="where the built-in corpus is prepared")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for every run")
    parser.add_argument("--report", action="store_true", help="only report on the runs that are there")
    parser.add_argument(
        "--dry_run", action="store_true", help="print the commands of the runs that are missing"
    )
    options = parser.parse_args()
    missing = [
        (model, arm, seed)
        for seed in options.seeds  # a pair is complete before the next seed begins
        for model in options.models
        for arm in options.arms
        if not finished(folder(options.out, model, arm, seed))
    ]
    for index, (model, arm, seed) in enumerate(() if options.report else missing):
        command = run_command(options, model, arm, seed)
        print(f"run {index + 1} of {len(missing)}: {' '.join(command)}", flush=True)
        if options.dry_run:
            continue
        began = time.monotonic()
        done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"error: the run ended with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        result = next((line for line in done.stdout.splitlines() if line.startswith("result")), "")
        print(f"  {time.monotonic() - began:.0f} s | {result}", flush=True)
    if not options.dry_run:
        report(options)


def folder(out: Path, model: str, arm: str, seed: int) -> Path:
    """A run's folder; the diagnostics take what differs in the seed only for repetitions."""
    return out / f"{model}-{arm}-s{seed}"


def run_command(options: argparse.Namespace, model: str, arm: str, seed: int) -> list[str]:
    """The command of one run, from the repository's root."""
    path = folder(options.out.resolve(), model, arm, seed)
    return [
        "python", "pretrain/main.py", "--ds_config", "ds_configs/zero2.json", "--config", ARMS[arm],
        "--model", f"{model}-mini", "--seed", str(seed), "--name", path.name, "--runs_dir", str(path.parent),
        "--data_root", str(Path(options.data_root).resolve()), "--logging.wandb", "disabled", *options.flags,
    ]  # fmt: skip


def finished(path: Path) -> bool:
    """Whether a run has all its steps and its last checkpoint."""
    try:
        steps = yaml.safe_load((path / "config.yaml").read_text())["steps"]
        newest = (path / "latest").read_text().strip()
    except OSError:
        return False
    return newest == f"step_{steps:06d}" and (path / "checkpoints" / newest).is_dir()


# ---------------------------------------------------------------------- report


def report(options: argparse.Namespace) -> None:
    """Write section.md and the pictures, and print the section."""
    lines = [*header(options)]
    for model in options.models:
        runs = {
            arm: {
                seed: read_metrics(path)
                for seed in options.seeds
                if finished(path := folder(options.out, model, arm, seed))
            }
            for arm in options.arms
        }
        if len(runs.get("control", {})) == 0:
            continue
        lines += ["", f"**{model}-mini**", "", *loss_table(runs), "", *measure_table(runs), *releases(runs)]
        folders = [folder(options.out, model, arm, seed) for arm, found in runs.items() for seed in found]
        subprocess.run(
            [sys.executable, "-m", "pretrain.diagnostics", *map(str, folders), "--sequences", "64",
             "--micro_batch", "16", "--out", str(options.out / "plots" / model)],
            cwd=Path.cwd(), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    text = "\n".join(lines) + "\n"
    (options.out / "section.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {options.out}/section.md and {options.out}/plots/")


def header(options: argparse.Namespace) -> list[str]:
    """Command, commit, machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    seconds = [
        rows[-1]["seconds"]
        for model in options.models
        for arm in options.arms
        for seed in options.seeds
        if finished(path := folder(options.out, model, arm, seed))
        and "seconds" in (rows := read_metrics(path))[-1]
    ]
    flags = f" --flags {' '.join(options.flags)}" if options.flags else ""
    seeds, models = " ".join(map(str, options.seeds)), " ".join(options.models)
    if options.arms != list(ARMS):
        models += " --arms " + " ".join(options.arms)
    machine = f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    each = (
        f"{len(seconds)} runs, {statistics.median(seconds):.0f} s of training each (median)"
        if seconds
        else "no run"
    )
    return [
        f"    python benchmarks/upper_qk_experiment.py --seeds {seeds} --models {models}{flags}",
        "",
        f"Commit {commit}, {machine}; {each}.",
    ]


def processor() -> str:
    """Name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def loss_table(runs: dict[str, dict[int, Any]]) -> list[str]:
    """Final validation loss of each arm, and its paired difference from the control."""
    columns = [
        "arm", "seeds", "val loss, mean ± sd", "perplexity", "Δ loss, paired [95 % CI]", "Δ perplexity [95 % CI]",
        "tokens to the control's loss",
    ]  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    control = runs["control"]
    for arm, by_seed in runs.items():
        losses = {seed: last(rows, "val_loss") for seed, rows in by_seed.items()}
        if not losses:
            continue
        cells = [arm, str(len(losses)), spread(losses.values(), 4), spread(map(math.exp, losses.values()), 2)]
        if arm == "control":
            cells += ["", "", ""]
        else:
            base = {seed: last(control[seed], "val_loss") for seed in losses if seed in control}
            cells.append(interval([losses[seed] - base[seed] for seed in base], 4))
            cells.append(interval([math.exp(losses[seed]) - math.exp(base[seed]) for seed in base], 2))
            saved = [tokens_saved(by_seed[seed], base[seed]) for seed in base]
            cells.append(", ".join("not reached" if s is None else f"{-100 * s:+.1f} %" for s in saved))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measure_table(runs: dict[str, dict[int, Any]]) -> list[str]:
    """Diagnostics of the upper half (mean over its layers) just after the slow-down and at the end."""
    arms = [arm for arm in runs if runs[arm]]
    lines = [
        "| upper half, mean ± sd | step | " + " | ".join(arms) + " | Δ upper_qk − control [95 % CI] |",
        "|---|---|" + "---|" * (len(arms) + 1),
    ]
    rows_of = {(arm, seed): rows for arm, found in runs.items() for seed, rows in found.items()}
    looks = sorted(
        {row["step"] for rows in rows_of.values() for row in rows if upper(row, "path_energy") is not None}
    )
    for key, title in MEASURES.items():
        for step in dict.fromkeys(looks[:1] + looks[-1:]):
            values: dict[str, dict[int, float]] = {arm: {} for arm in arms}
            for (arm, seed), rows in rows_of.items():
                value = next((upper(row, key) for row in rows if row["step"] == step), None)
                if value is not None:
                    values[arm][seed] = value
            if not all(values.values()):
                continue
            cells = [title, f"{step:,}", *(spread(found.values(), 4) for found in values.values())]
            ruled, base = values.get("upper_qk", {}), values["control"]
            cells.append(interval([ruled[seed] - base[seed] for seed in ruled if seed in base], 4))
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def releases(runs: dict[str, dict[int, Any]]) -> list[str]:
    """When the release by maturity fired."""
    found = []
    for seed, rows in runs.get("upper_qk_maturity", {}).items():
        slow = [row["step"] for row in rows if row["lr/upper_qk/decay"] < 0.2501 * row["lr/base/decay"]]
        steps = rows[-1]["step"]
        found.append(f"seed {seed} at step {slow[-1]:,} ({slow[-1] / steps:.1%})")
    return ["", "Released by maturity: " + ", ".join(found) + "."] if found else []


def upper(row: dict[str, Any], measure: str) -> float | None:
    """Mean over the layers l with 2 l >= L."""
    values = []
    while (value := row.get(f"diagnostics/{measure}/layer_{len(values)}")) is not None:
        values.append(value)
    return statistics.fmean(values[(len(values) + 1) // 2 :]) if len(values) > 1 else None


def last(rows: Sequence[dict[str, Any]], key: str) -> float:
    """The newest value of a figure."""
    return next(row[key] for row in reversed(rows) if key in row)


def tokens_saved(rows: Sequence[dict[str, Any]], target: float) -> float | None:
    """Share of the run's tokens that were not needed to reach a validation loss, by linear interpolation."""
    curve = [(row["tokens"], row["val_loss"]) for row in rows if "val_loss" in row]
    for (early, above), (late, below) in itertools.pairwise(curve):
        if below <= target < above:
            reached = early + (late - early) * (above - target) / (above - below)
            return 1 - reached / curve[-1][0]
    return None


def spread(values: Any, digits: int) -> str:
    """Mean ± sample standard deviation."""
    found = list(values)
    deviation = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.{digits}f}{deviation}"


def interval(differences: Sequence[float], digits: int) -> str:
    """Mean of paired differences with its 95 % confidence interval (Student's t)."""
    if not differences:
        return ""
    found = paired_interval(differences)
    if found.count < 2:
        return f"{found.mean:+.{digits}f} [one pair]"
    return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


if __name__ == "__main__":
    main()
