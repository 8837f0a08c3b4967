"""How much of the spread between seeds comes from the finite validation set, from the losses of single windows.

The seeds of a study are validated on the same windows. So the paired difference of seed s on window w is

    x_sw = mean + a_s + b_w + c_sw

with a_s what the seed does, b_w what the window does to every seed alike, and c_sw the rest (two-way analysis of
variance). The spread of the differences over seeds has the variance of a plus that of c over the number of windows. A
larger validation set reduces the latter. That of b over the number of windows is not in it at all: it is by how much
another text of the same kind would have moved the mean difference, however many seeds there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pretrain.growth.command import held_out
from pretrain.growth.worth import Ablation
from pretrain.run.saved import SavedRun
from pretrain.study.paired import baseline_of, in_common, paired_differences, runs_of
from pretrain.study.results import RunResult
from pretrain.study.study_file import Study

MEASURE = "val_loss"
"""What is measured window by window."""


@dataclass(frozen=True)
class WindowVariance:
    """Variances of single windows' paired differences, in the measure's unit squared."""

    own: float
    """Of c: what differs from seed to seed."""
    common: float
    """Of b: what every seed has alike."""
    windows: int
    """Windows that were measured."""
    validated: int
    """n, the windows of the runs' validation."""
    text: str
    """Where the windows are from."""
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Standard deviation of the differences over seeds that comes from n windows alone: √(own / n)."""
        return math.sqrt(self.own / self.validated)

    @property
    def text_error(self) -> float:
        """Standard error of a mean difference from the choice of n windows, which no seeds reduce: √(common / n)."""
        return math.sqrt(self.common / self.validated)

    def sd(self, sd: float, times: int) -> float:
        """What a spread of *sd* over seeds becomes with *times* as many windows."""
        return math.sqrt(max(0.0, sd**2 - self.error**2 * (1 - 1 / times)))


def window_variance(
    pilot: Study,
    results: Sequence[RunResult],
    windows: int,
    progress: Callable[[int, int], None] | None = None,
) -> WindowVariance | None:
    """Measure the final models of the pilot's finished pairs on *windows* held-out windows, one by one.

    Args:
        results: the pilot's runs.
        progress: is called with the number of windows read and that of all, over all runs.

    Returns:
        None if no variant has two pairs on the same two windows or more.

    Raises:
        UserError: a checkpoint that cannot be read, or no held-out text of it on this machine.
    """
    pairs = dict(_pairs(pilot, results))
    runs = {run.folder: run for each in pairs.values() for pair in each for run in pair}
    measured: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    text = ""
    for index, run in enumerate(runs.values()):

        def report(done: int, passes: int, before: int = index) -> None:
            if progress:
                progress(before * windows + round(windows * done / passes), len(runs) * windows)

        inputs, losses, text = _losses(run, windows, report)
        measured[run.folder] = inputs, losses
    tables, notes = [], []
    for name, each in pairs.items():
        first = measured[each[0][0].folder][0]
        if all(np.array_equal(measured[run.folder][0], first) for pair in each for run in pair):
            tables.append(np.stack([measured[a.folder][1] - measured[b.folder][1] for a, b in each]))
        else:
            notes.append(
                f"{name} and its baseline read other windows, and are left out of the windows' variance"
            )
    if not tables:
        return None
    if any(run.planned.run.validation.data for run in runs.values()):
        notes.append(f"the runs validate on validation.data; these windows are {text}")
    own, common = variances(tables)
    if math.isnan(own):
        return None
    count = tables[0].shape[1]
    validated = min(run.planned.run.validation.sequences for run in runs.values())
    if count < windows:
        notes.append(f"there are no more than {count:,} windows of {text}")
        validated = min(validated, count)
    return WindowVariance(own, common, count, validated, text, tuple(notes))


def _pairs(
    pilot: Study, results: Sequence[RunResult]
) -> Iterable[tuple[str, list[tuple[RunResult, RunResult]]]]:
    """By variant, its runs and their baselines, where there are two pairs or more of one seed each."""
    for comparison in pilot.comparisons:
        for variant in comparison.variants:
            runs = runs_of(results, comparison, variant.name)
            baseline = baseline_of(results, comparison, variant.name)
            found = paired_differences(results, comparison, variant.name, MEASURE, 1)
            seeds = [seed for seed, value in found.items() if math.isfinite(value)]
            if comparison.baseline_of(variant.name) == variant.name or not in_common(runs, baseline):
                continue
            if len(seeds) > 1:
                name = f"{comparison.name}: {variant.name}" if comparison.name else variant.name
                yield name, [(runs[seed], baseline[seed]) for seed in seeds]


def _losses(
    run: RunResult, windows: int, progress: Callable[[int, int], None]
) -> tuple[np.ndarray, np.ndarray, str]:
    """Token ids [n, T] of the windows, the final model's loss on each (fp64 [n], nats per token), and their text."""
    source = SavedRun.open(run.folder, run.steps)
    inputs, labels, starts, text = held_out(source, windows)
    network = source.load_model().to("cuda" if torch.cuda.is_available() else "cpu")
    (losses,) = Ablation(network, inputs, labels, starts).losses([()], progress)
    return inputs, losses.numpy(), text


def variances(tables: Sequence[np.ndarray]) -> tuple[float, float]:
    """The variances of c and of b, pooled over tables of paired differences [seeds, windows].

    Of the mean squares of a two-way table without repetitions, that of the rest expects var(c), and that of the
    windows var(c) + seeds var(b). NaN for fewer than two seeds or windows.
    """
    rest = degrees = 0.0
    for table in tables:
        rows, columns = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
        rest += float(np.square(table - rows - columns + table.mean()).sum())
        degrees += (table.shape[0] - 1) * (table.shape[1] - 1)
    if not degrees:
        return math.nan, math.nan
    own = rest / degrees
    common = [(float(table.mean(0).var(ddof=1)) - own / len(table)) for table in tables]
    return own, max(0.0, float(np.mean(common)))
