"""Compares figures of several runs: by layer, over training, and as differences of groups paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
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
    "feature_drift": "feature drift since the last look",
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
    values = [layer_values(row, measure) for row in rows]
    layers = sorted(set.intersection(*(set(by_layer) for by_layer in values))) if values else []
    return {layer: Band.of(by_layer[layer] for by_layer in values) for layer in layers}


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
    by_pair = []
    for run, baseline_run in paired(group, baseline):
        of_run, of_baseline = layer_values(run.last, measure), layer_values(baseline_run.last, measure)
        by_pair.append(
            {layer: of_run[layer] - of_baseline[layer] for layer in of_run.keys() & of_baseline.keys()}
        )
    layers = sorted(set.intersection(*(set(values) for values in by_pair))) if by_pair else []
    return {layer: Band.of(values[layer] for values in by_pair) for layer in layers}


def over_training(runs: Sequence[RunFigures], key: str) -> dict[int, Band]:
    """A figure of the metrics by step over the seeds, for the steps that all of them have."""
    values = [{row["step"]: row[key] for row in run.rows if key in row} for run in runs]
    steps = sorted(set.intersection(*(set(by_step) for by_step in values))) if values else []
    return {step: Band.of(by_step[step] for by_step in values) for step in steps}


def difference_over_training(
    group: Sequence[RunFigures], baseline: Sequence[RunFigures], key: str
) -> dict[int, Band]:
    """group − baseline of a figure of the metrics by step, over the pairs of seeds."""
    by_pair = []
    for run, baseline_run in paired(group, baseline):
        of_run = {row["step"]: row[key] for row in run.rows if key in row}
        of_baseline = {row["step"]: row[key] for row in baseline_run.rows if key in row}
        by_pair.append(
            {step: of_run[step] - of_baseline[step] for step in of_run.keys() & of_baseline.keys()}
        )
    steps = sorted(set.intersection(*(set(values) for values in by_pair))) if by_pair else []
    return {step: Band.of(values[step] for values in by_pair) for step in steps}


def table(groups: dict[str, list[RunFigures]]) -> list[str]:
    """Format the measures by layer at the last checkpoint, mean over seeds: a block of lines for each group."""
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
