"""Compares figures of several runs: by layer, over training, and as differences of groups paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import UserError
from pretrain.diagnostics.attention import HEAD_MEASURES
from pretrain.diagnostics.forward import LAYER_MEASURES
from pretrain.diagnostics.measure import RunFigures

DISPLACEMENTS = ("lambda_q_initial", "lambda_k_initial", "lambda_q_release", "lambda_k_release")
BY_LAYER = (*HEAD_MEASURES, *LAYER_MEASURES, *DISPLACEMENTS, "feature_drift")
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


@dataclass(frozen=True)
class Band:
    """Mean and standard deviation over seeds; the deviation of a single seed is NaN."""

    mean: float
    sd: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Band:
        """Compute the band of at least one value."""
        numbers = list(values)
        sd = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
        return cls(statistics.fmean(numbers), sd, len(numbers))


def by_group(runs: Sequence[RunFigures]) -> dict[str, list[RunFigures]]:
    """Group the runs that differ in their seed only, in the order in which they were given.

    Raises:
        UserError: two runs of a group have the same seed.
    """
    groups: dict[str, list[RunFigures]] = {}
    for run in runs:
        if any(run.seed == other.seed for other in groups.get(run.group, [])):
            raise UserError(f"runs: {run.name} was given twice")
        groups.setdefault(run.group, []).append(run)
    return groups


def layer_values(row: dict[str, Any], measure: str) -> dict[int, float]:
    """A measure by layer, for the layers that have it."""
    prefix = f"diagnostics/{measure}/layer_"
    return {int(key.removeprefix(prefix)): row[key] for key in row if key.startswith(prefix)}


def layer_bands(rows: Sequence[dict[str, Any]], measure: str) -> dict[int, Band]:
    """A measure by layer over the seeds, for the layers that all of them have."""
    return _bands([layer_values(row, measure) for row in rows])


def paired(
    group: Sequence[RunFigures], baseline: Sequence[RunFigures]
) -> list[tuple[RunFigures, RunFigures]]:
    """Pair the runs of two groups by seed; when no seed matches, one by one in the order of the groups."""
    seeds = {run.seed: run for run in baseline}
    pairs = [(run, seeds[run.seed]) for run in group if run.seed in seeds]
    return pairs or list(zip(group, baseline, strict=False))


def differences(group: Sequence[RunFigures], baseline: Sequence[RunFigures], measure: str) -> dict[int, Band]:
    """group − baseline of a measure at the last checkpoint, by layer, over the pairs of seeds.

    Raises:
        UserError: models of another depth, whose layers do not correspond.
    """
    if group[0].num_layers != baseline[0].num_layers:
        raise UserError(
            f"runs: {group[0].name} has {group[0].num_layers} layers, {baseline[0].name} has "
            f"{baseline[0].num_layers}; a difference by layer needs models of one depth"
        )
    return _paired_bands(group, baseline, lambda run: layer_values(run.last, measure))


def over_training(runs: Sequence[RunFigures], key: str) -> dict[int, Band]:
    """A figure of the metrics by step over the seeds, for the steps that all of them have."""
    return _bands([_by_step(run, key) for run in runs])


def difference_over_training(
    group: Sequence[RunFigures], baseline: Sequence[RunFigures], key: str
) -> dict[int, Band]:
    """group − baseline of a figure of the metrics by step, over the pairs of seeds."""
    return _paired_bands(group, baseline, lambda run: _by_step(run, key))


def _by_step(run: RunFigures, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in run.rows if key in row}


def _paired_bands(
    group: Sequence[RunFigures],
    baseline: Sequence[RunFigures],
    values_of: Callable[[RunFigures], dict[int, float]],
) -> dict[int, Band]:
    """The differences of pairs of runs, at the layers or steps that both have."""
    pairs = [(values_of(run), values_of(other)) for run, other in paired(group, baseline)]
    return _bands(
        [{at: ours[at] - theirs[at] for at in ours.keys() & theirs.keys()} for ours, theirs in pairs]
    )


def _bands(values: Sequence[dict[int, float]]) -> dict[int, Band]:
    """Over several runs, at the layers or steps that all of them have, in order."""
    places = sorted(set.intersection(*map(set, values))) if values else []
    return {at: Band.of(by_place[at] for by_place in values) for at in places}


def table(groups: dict[str, list[RunFigures]]) -> list[str]:
    """Format the measures by layer at the last checkpoint, mean over seeds: a block of lines for each
    group."""
    lines = []
    for name, runs in groups.items():
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 run"
        steps = sorted({run.last["step"] for run in runs})
        lines.append(f"{name} ({seeds}, step {', '.join(f'{step:,}' for step in steps)})")
        bands = {measure: layer_bands([run.last for run in runs], measure) for measure in BY_LAYER}
        shown = [measure for measure in BY_LAYER if bands[measure]]
        width = max(len(TITLES[measure]) for measure in shown)
        lines.append(
            "  " + "layer".ljust(width) + "".join(f"{layer:>9}" for layer in range(runs[0].num_layers))
        )
        for measure in shown:
            cells = [
                f"{bands[measure][layer].mean:9.4g}" if layer in bands[measure] else f"{'-':>9}"
                for layer in range(runs[0].num_layers)
            ]
            lines.append("  " + TITLES[measure].ljust(width) + "".join(cells))
    return lines
