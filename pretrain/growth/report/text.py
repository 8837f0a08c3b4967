"""The lines of a growth report on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import correlation, median

from model.heads import ascending, descending, format_heads, uniform
from pretrain.growth.report.law import Prediction
from pretrain.growth.report.worth import SMALL_INCREASE, SMALL_SHARE, HeadWorths
from pretrain.utils.tables import aligned

SURE = 2.0
"""Worths of fewer standard errors than this are indistinguishable from zero."""


def direction(heads: Sequence[int]) -> float | None:
    """Pearson's correlation of head count with depth: 1 ascending, -1 descending; None if all are equal."""
    return None if len(set(heads)) < 2 else correlation(range(len(heads)), heads)


def schedule_lines(heads: Sequence[int], others: Mapping[str, Sequence[int]]) -> list[str]:
    """The schedule *heads*, beside the uniform one of as many heads, the two sorted ones, and *others* by
    name."""
    mean = sum(heads) / len(heads)
    even = uniform(round(mean), len(heads))
    exactly = "" if sum(even) == sum(heads) else f" ({sum(heads)} heads do not spread evenly)"
    found = direction(heads)
    trend = "every layer has as many" if found is None else f"correlation with depth {found:+.2f}"
    return [
        f"schedule  {format_heads(heads)}: {sum(heads)} heads, {mean:.2f} a layer, {trend}",
        f"          uniform {format_heads(even)}{exactly}; ascending {format_heads(ascending(heads))}; "
        f"descending {format_heads(descending(heads))}",
        *(f"          {name} {format_heads(own)}: {sum(own)} heads" for name, own in others.items()),
    ]


def law_lines(
    predictions: Sequence[Prediction], criterion: str = "incrt", most: int | None = None
) -> list[str]:
    """Predicted against observed head counts, and what the law does not hold for.

    Args:
        criterion: by which the run grew.
        most: heads at which it stopped a layer; None if that is not known.
    """
    rows = [("layer", "grown", "fitted", "κ²", "predicted", "observed", "error", "")]
    for found in predictions:
        error, fit = found.relative_error, ("-", "-", "-", "-")
        if found.predicted is not None and found.kappa_squared is not None and error is not None:
            fit = (str(found.fitted), f"{found.kappa_squared:.3g}", f"{found.predicted:.1f}", f"{error:+.0%}")
        why_not = f"no prediction: {found.why_not}" if found.why_not else ""
        counts = (str(found.layer), str(found.events))
        rows.append((*counts, *fit[:3], str(found.observed), fit[3], why_not))
    return [
        "head counts predicted as K_0 + κ² ln(Γ(0) / θ_w), κ² from the first growth events of each layer:",
        *aligned(rows, left={7}),
        *_law_notes(predictions, criterion, most),
    ]


def _law_notes(predictions: Sequence[Prediction], criterion: str, most: int | None) -> list[str]:
    if criterion != "incrt":
        return [f"note: the law is one of incrt's threshold, which {criterion} does not ask"]
    full = [str(found.layer) for found in predictions if most is not None and found.observed >= most]
    several = "s" * (len(full) != 1)
    return [f"note: layer{several} {', '.join(full)} stopped at growth.maximum, {most} heads"] if full else []


def worth_lines(found: HeadWorths, text: str) -> list[str]:
    """Worths by layer, and the removal curve."""
    largest = max(max(worths) for worths in found.worths)
    header = ("layer", "heads", "smallest", "median", "largest", "small", "negative", "unsure")
    rows: list[tuple[str, ...]] = [header]
    for layer, (worths, errors) in enumerate(zip(found.worths, found.errors, strict=True)):
        pairs = list(zip(worths, errors, strict=True))
        counts = (
            sum(worth < SMALL_SHARE * largest for worth in worths),
            sum(worth < 0 for worth in worths),
            sum(not abs(worth) > SURE * error for worth, error in pairs),
        )
        figures = (min(worths), median(worths), max(worths))
        rows.append(
            (str(layer), str(len(worths)), *(f"{value:+.6f}" for value in figures), *map(str, counts))
        )
    best = found.removable
    rest = [("removed", "share", "loss", "increase")] + [
        (str(point.removed), f"{point.share:.0%}", f"{point.loss:.4f}", f"{point.increase:+.2%}")
        for point in found.curve
    ]
    return [
        f"loss      {found.loss:.4f} nats per {found.per} on {found.windows} windows "
        f"({found.tokens:,} labels): {text}",
        f"worth of each head, in nats per {found.per}: the loss without it minus the loss of the whole model",
        *aligned(rows),
        f"small: below {SMALL_SHARE:.0%} of the largest worth; "
        f"unsure: within {SURE:g} standard errors of zero",
        "heads removed together, smallest worth first, without training again:",
        *aligned(rest),
        f"the largest share tried that costs at most {SMALL_INCREASE:.0%} of loss: {best.share:.0%} "
        f"({best.removed} of {found.curve[-1].removed} heads, loss {best.increase:+.2%})",
    ]
