"""The tables and the picture of a study without a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.study.report.drawing import panel_axes
from pretrain.study.statistics.paired import CONFIDENCE
from pretrain.study.summaries import View
from pretrain.utils.format import NOTHING, interval_text

if TYPE_CHECKING:
    from pretrain.study.statistics.effects import Effects

Row = dict[str, Any]
MOST_CONFOUNDED = 6
"""Of which names are listed."""


def analyze(view: View) -> Effects | None:
    """The effects, where the finished runs allow an analysis."""
    return None if view.effects is None or view.effects.unknown else view.effects


def describe_design(view: View) -> Iterator[str]:
    """What to know before reading the tables: sentences."""
    effects = view.effects
    if effects is None:
        return
    if effects.unknown:
        yield f"No analysis yet: {effects.unknown}."
        return
    if effects.left_out:
        yield f"{effects.left_out} runs without a finite result are left out."
    levels = len(effects.levels)
    yield (
        f"{levels} level effects, each with a 95 % interval that is not adjusted: if nothing mattered, "
        f"{levels * (1 - CONFIDENCE):.2g} would exclude zero by chance, on average."
    )
    if unseen := [each.contrast.name for each in view.contrasted if each.fits is None]:
        yield f"{', '.join(unseen)}: not known; so few runs do not show interactions."
    fit = effects.least_squares
    yield f"Residual sd {math.sqrt(fit.scale):.4f} on {fit.df_resid:.0f} degrees of freedom."
    if effects.lack_of_fit is None:
        yield "Lack of fit cannot be tested: that takes two seeds, and more runs than terms."
    else:
        f, p = effects.lack_of_fit
        yield f"Lack of fit: F = {f:.2f}, p = {p:.3g}."
    yield from _list_confounded(effects)


def _list_confounded(effects: Effects) -> Iterator[str]:
    """Which effects are confounded; they are not estimated apart."""
    factors = len(effects.design.levels)
    every = (factors - 1) * (factors - 2) // 2
    if effects.confounded and all(len(others) == every for others in effects.confounded.values()):
        yield "Each main effect is confounded with the interactions of any two other factors."
        return
    for term, others in effects.confounded.items():
        more = f" and {len(others) - MOST_CONFOUNDED} more" if len(others) > MOST_CONFOUNDED else ""
        yield f"Confounded with {term}: {', '.join(others[:MOST_CONFOUNDED])}{more}."


def rows(view: View) -> dict[str, list[Row]]:
    """The rows of the tables."""
    effects = analyze(view)
    if effects is None:
        return {name: [] for name in SECTIONS}
    return {
        "effects": [asdict(each) | {"disagree": each.fits_disagree} for each in effects.levels],
        "variance": [asdict(each) for each in effects.variance],
        "predictions": [asdict(each) for each in effects.predictions],
    }


def interval(found: Row | None, form: str = "+.4f") -> str:
    """An estimate with its interval."""
    return NOTHING if found is None else interval_text(found["value"], found["low"], found["high"], form)


def p_text(value: float | None) -> str:
    """A p value."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.3g}"


EFFECTS: dict[str, Callable[[Row], str]] = {
    "factor": lambda row: row["factor"],
    "level": lambda row: row["level"],
    "runs": lambda row: str(row["runs"]),
    "effect [95 % interval]": lambda row: interval(row["least_squares"]),
    "Huber's, where it disagrees": lambda row: interval(row["robust"]) if row["disagree"] else "",
    "outliers": lambda row: str(row["outliers"]),
}
VARIANCE: dict[str, Callable[[Row], str]] = {
    "term": lambda row: row["term"],
    "degrees": lambda row: str(row["degrees"]),
    "share": lambda row: f"{row['share']:.1%}",
    "F": lambda row: NOTHING if math.isnan(row["f"]) else f"{row['f']:.2f}",
    "p": lambda row: p_text(row["p"]),
}
PREDICTIONS: dict[str, Callable[[Row], str]] = {
    "schedule": lambda row: row["name"],
    "levels": lambda row: ", ".join(row["levels"]),
    "predicted [95 % interval]": lambda row: interval(row["estimate"], ".4f"),
    "measured": lambda row: NOTHING if row["measured"] is None else f"{row['measured']:.4f}",
}
SECTIONS = {
    "effects": ("Effects of levels", EFFECTS),
    "variance": ("Analysis of variance", VARIANCE),
    "predictions": ("Predicted", PREDICTIONS),
}
"""Titles and columns, in the page's order."""


def draw_effects(view: View, path: Path) -> bool:
    """Draw a panel for each factor: the effect of each level; all on one scale."""
    effects, value = analyze(view), view.value
    if effects is None:
        return False
    factors = effects.design.levels
    with panel_axes(path, list(factors), columns=4, width=2.8, sharey=True) as axes:
        for axis, (factor, labels) in zip(axes, factors.items(), strict=True):
            estimates = [each.least_squares for each in effects.levels if each.factor == factor]
            axis.axhline(0, color="gray", linewidth=0.8)
            axis.errorbar(
                range(len(labels)),
                [each.value for each in estimates],
                yerr=[(each.high - each.low) / 2 for each in estimates],
                fmt="o-",
                capsize=3,
                label="least squares, 95 % interval",
            )
            axis.set_xticks(range(len(labels)), labels)
            axis.set_xlim(-0.5, len(labels) - 0.5)
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(f"effect on {value}")
    return True
