"""Compares metrics of several runs: by layer, over training, and as differences of groups paired by seed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from pretrain.diagnostics.measure import RunMeasures

TITLES = {
    "attention_distance": "attention distance D (tokens)",
    "attention_entropy": "attention entropy (nats)",
    "max_probability": "largest attention probability",
    "logit_spread": "spread of the logits (sd)",
    "attention_gate": "gate of attention",
    "attention_write": "attention write ‖a‖²/‖X‖²",
    "ffn_write": "FFN write ‖f‖²/‖X + a‖²",
    "path_energy": "writes below R/‖X‖²",
    "lambda_q_initial": "λ_Q from initialization",
    "lambda_k_initial": "λ_K from initialization",
    "lambda_q_release": "λ_Q from release",
    "lambda_k_release": "λ_K from release",
    "feature_drift": "feature drift since the last measurement",
}
Groups = dict[str, list[RunMeasures]]
"""Runs that differ in their seed only, by their name without it."""


def by_group(runs: Sequence[RunMeasures]) -> Groups:
    """Group the runs that differ in their seed only, in the order in which they were given."""
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def layer_values(row: dict[str, Any], measure: str) -> dict[int, float]:
    """A measure by layer, for the layers that have it."""
    prefix = f"diagnostics/{measure}/layer_"
    return {int(key.removeprefix(prefix)): row[key] for key in row if key.startswith(prefix)}


def take_last(runs: Sequence[RunMeasures], measure: str) -> pd.DataFrame:
    """A measure at the last checkpoint: a row for each seed, a column for each layer."""
    return _frame_by_seed(runs, [layer_values(run.last, measure) for run in runs])


def collect_over_steps(runs: Sequence[RunMeasures], key: str) -> pd.DataFrame:
    """A value of metrics.jsonl: a row for each seed, a column for each step."""
    return _frame_by_seed(runs, [{row["step"]: row[key] for row in run.rows if key in row} for run in runs])


def upper_half(runs: Sequence[RunMeasures], measure: str) -> pd.DataFrame:
    """As collect_over_steps, the mean of a measure over the layers l with 2 l >= L."""
    found = []
    for run in runs:
        by_step = {row["step"]: layer_values(row, measure) for row in run.rows}
        upper = {step: [v for i, v in by.items() if 2 * i >= run.num_layers] for step, by in by_step.items()}
        found.append({step: fmean(values) for step, values in upper.items() if values})
    return _frame_by_seed(runs, found)


def _frame_by_seed(runs: Sequence[RunMeasures], values: list[dict[int, float]]) -> pd.DataFrame:
    return pd.DataFrame(values, index=[run.seed for run in runs], dtype=float)


def difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """ours − theirs of each seed that both have; when no seed matches, one by one in their order."""
    seeds = ours.index.intersection(theirs.index)
    if seeds.empty:
        seeds = range(min(len(ours), len(theirs)))
        ours, theirs = ours.reset_index(drop=True), theirs.reset_index(drop=True)
    return ours.loc[seeds] - theirs.loc[seeds]


def bands(values: pd.DataFrame) -> pd.DataFrame:
    """``mean`` and sample deviation ``sd`` (NaN of a single seed) by layer or step, where all seeds have a
    value."""
    values = values.dropna(axis="columns").sort_index(axis="columns")
    return pd.DataFrame({"mean": values.mean(), "sd": values.std()})


def describe_depths(groups: Groups) -> str:
    """Why groups have no differences by layer: models of another depth, whose layers do not correspond. Empty
    for models of one depth."""
    depths = {name: runs[0].num_layers for name, runs in groups.items()}
    listed = ", ".join(f"{depth} in {name}" for name, depth in depths.items())
    return f"layers differ ({listed}): no differences by layer" if len({*depths.values()}) > 1 else ""


def find_baselines(groups: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The group that each group is compared with, where there is one.

    In a study with several factors a name may be that of the last alone, or there is one for each level: of
    ``muon-tapered`` it is ``muon-uniform``, not ``adamw-uniform``.
    """
    # A run's name joins the labels of the factors by "-", and a label, such as 0.002, may have a dot.
    plain = {each: "-" + each.replace(".", "-") for each in groups}
    ends = tuple("-" + name.replace(".", "-") for name in names)
    baselines = [each for each in groups if plain[each] in ends]
    baselines = baselines or [each for each in groups if plain[each].endswith(ends)]
    if not baselines:
        return {}
    if len(baselines) == 1:
        return dict.fromkeys(groups, baselines[0])

    def count_shared(group: str, baseline: str) -> int:
        same = zip(group.split("-"), baseline.split("-"), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda parts: parts[0] == parts[1], same))

    found = {}
    for group in groups:
        nearest = max(baselines, key=lambda each: count_shared(group, each))
        if count_shared(group, nearest):
            found[group] = nearest
    return found


def table(groups: Groups) -> list[str]:
    """Format the measures by layer at the last checkpoint, mean over seeds: a block for each group."""
    blocks = []
    for name, runs in groups.items():
        means = {title: bands(take_last(runs, measure))["mean"] for measure, title in TITLES.items()}
        shown = pd.DataFrame(means).rename_axis("layer").dropna(axis="columns", how="all").T
        steps = sorted({run.last["step"] for run in runs})
        blocks.append(f"{name} (seeds: {len(runs)}, step {', '.join(f'{step:,}' for step in steps)})")
        blocks.append(shown.to_string(float_format="{:.4g}".format, na_rep="-"))
    return blocks
