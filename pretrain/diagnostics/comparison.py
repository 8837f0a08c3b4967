"""Compares figures of several runs: by layer, over training, and as differences of groups paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from model.errors import UserError
from pretrain.diagnostics.measure import RunFigures
from pretrain.utils.tables import aligned

TITLES = {
    "attention_distance": "attention distance D (tokens)",
    "attention_entropy": "attention entropy (nats)",
    "max_probability": "largest attention probability",
    "logit_spread": "spread of the logits (sd)",
    "attention_write": "attention write ‖a‖²/‖X‖²",
    "ffn_write": "FFN write ‖f‖²/‖X + a‖²",
    "path_energy": "writes below R/‖X‖²",
    "lambda_q_initial": "λ_Q from initialisation",
    "lambda_k_initial": "λ_K from initialisation",
    "lambda_q_release": "λ_Q from release",
    "lambda_k_release": "λ_K from release",
    "feature_drift": "feature drift since the last measurement",
}
BY_LAYER = tuple(TITLES)
"""Measures that every layer has, in the order in which they are shown."""
Groups = dict[str, list[RunFigures]]
"""Runs that differ in their seed only, by their name without it."""


def by_group(runs: Sequence[RunFigures]) -> Groups:
    """Group the runs that differ in their seed only, in the order in which they were given.

    Raises:
        UserError: two runs of a group have the same seed.
    """
    groups: Groups = {}
    for run in runs:
        if any(run.seed == other.seed for other in groups.get(run.group, [])):
            raise UserError(f"runs: {run.name} was given twice")
        groups.setdefault(run.group, []).append(run)
    return groups


def layer_values(row: dict[str, Any], measure: str) -> dict[int, float]:
    """A measure by layer, for the layers that have it."""
    prefix = f"diagnostics/{measure}/layer_"
    return {int(key.removeprefix(prefix)): row[key] for key in row if key.startswith(prefix)}


def at_the_end(runs: Sequence[RunFigures], measure: str) -> pd.DataFrame:
    """A measure at the last checkpoint: a row for each seed, a column for each layer."""
    return _by_seed(runs, [layer_values(run.last, measure) for run in runs])


def over_training(runs: Sequence[RunFigures], key: str) -> pd.DataFrame:
    """A figure of the metrics: a row for each seed, a column for each step."""
    return _by_seed(runs, [{row["step"]: row[key] for row in run.rows if key in row} for run in runs])


def upper_half(runs: Sequence[RunFigures], measure: str) -> pd.DataFrame:
    """As over_training, the mean of a measure over the layers l with 2 l >= L."""
    layers = range((runs[0].num_layers + 1) // 2, runs[0].num_layers)
    return sum(over_training(runs, f"diagnostics/{measure}/layer_{layer}") for layer in layers) / len(layers)


def _by_seed(runs: Sequence[RunFigures], values: list[dict[int, float]]) -> pd.DataFrame:
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


def check_depth(groups: Groups, baseline: str) -> None:
    """Refuse a difference by layer of models of another depth, whose layers do not correspond."""
    other = groups[baseline][0]
    for run in (runs[0] for runs in groups.values()):
        if run.num_layers != other.num_layers:
            raise UserError(
                f"runs: {run.name} has {run.num_layers} layers, {other.name} has {other.num_layers}; a "
                "difference by layer needs models of one depth"
            )


def table(groups: Groups) -> list[str]:
    """Format the measures by layer at the last checkpoint, mean over seeds: a block of lines for each
    group."""
    lines = []
    for name, runs in groups.items():
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 run"
        steps = sorted({run.last["step"] for run in runs})
        lines.append(f"{name} ({seeds}, step {', '.join(f'{step:,}' for step in steps)})")
        layers = range(runs[0].num_layers)
        rows = [["  layer", *map(str, layers)]]
        for measure, title in TITLES.items():
            mean = bands(at_the_end(runs, measure))["mean"]
            if len(mean):
                rows.append([f"  {title}", *(f"{mean[i]:.4g}" if i in mean else "-" for i in layers)])
        lines += aligned(rows, left={0})
    return lines
