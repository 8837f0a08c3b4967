"""The tables and pictures of a designed experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.study.design.effects import Effects
from pretrain.study.report.pictures import line_style, panel_axes
from pretrain.study.statistics.linear_model import Estimate
from pretrain.study.statistics.paired import CONFIDENCE
from pretrain.study.summaries import View
from pretrain.utils.format import NOTHING, interval_text

Row = dict[str, Any]
MOST_INTERACTIONS = 9
"""Of which a panel is drawn."""
MOST_CONFOUNDED = 6
"""Of which names are listed."""


def analyze_designs(view: View) -> dict[str, Effects]:
    """By comparison: the analysis of its design, where the finished runs allow one."""
    return {name: effects for name, effects in view.effects.items() if not effects.unknown}


def describe_designs(view: View) -> Iterator[str]:
    """What to know about the designs before reading their tables: sentences."""
    for name, effects in view.effects.items():
        where = f"{name}: " if name else ""
        if effects.unknown:
            yield f"{where}No analysis yet: {effects.unknown}."
            continue
        if effects.left_out:
            yield f"{where}{effects.left_out} runs without a finite result are left out."
        levels = len(effects.levels)
        primary = f"; {len(effects.primary)} primary contrasts, adjusted (Holm)" if effects.primary else ""
        yield (
            f"{where}{levels} level effects, each with a 95 % interval that is not adjusted: if nothing "
            f"mattered, {levels * (1 - CONFIDENCE):.2g} would exclude zero by chance, on average{primary}."
        )
        if unseen := [each.name for each in effects.primary if each.estimate is None]:
            yield f"{where}{', '.join(unseen)}: not known; so few runs do not show interactions."
        fit = effects.least_squares
        yield f"{where}Residual sd {fit.sd:.4f} on {fit.degrees} degrees of freedom."
        if effects.lack_of_fit is None:
            yield f"{where}Lack of fit cannot be tested: that takes two seeds, and more runs than terms."
        else:
            f, p = effects.lack_of_fit
            yield f"{where}Lack of fit: F = {f:.2f}, p = {p:.3g}."
        yield from (where + line for line in _list_confounded(effects))


def _list_confounded(effects: Effects) -> Iterator[str]:
    """Which effects of the design are confounded."""
    factors = len(effects.design.factors)
    every = (factors - 1) * (factors - 2) // 2
    if effects.confounded and all(len(others) == every for others in effects.confounded.values()):
        yield "Each main effect is confounded with the interactions of any two other factors."
        return
    for term, others in effects.confounded.items():
        more = f" and {len(others) - MOST_CONFOUNDED} more" if len(others) > MOST_CONFOUNDED else ""
        yield f"Confounded with {term}: {', '.join(others[:MOST_CONFOUNDED])}{more}."


def rows(view: View) -> dict[str, dict[str, list[Row]]]:
    """The rows of the tables, by table and comparison."""
    analysed = analyze_designs(view)
    return {
        "effects": {name: [asdict(each) for each in found.levels] for name, found in analysed.items()},
        "variance": {name: [asdict(each) for each in found.variance] for name, found in analysed.items()},
        "primary": {
            name: [_describe_primary(found, each) for each in found.primary]
            for name, found in analysed.items()
        },
        "predictions": {
            name: [asdict(each) for each in found.predictions] for name, found in analysed.items()
        },
    }


def _describe_primary(effects: Effects, found: Any) -> Row:
    contrast = effects.design.contrasts[found.name]
    return asdict(found) | {"formula": "; by ".join(each.formula for each in contrast.differences)}


def _interval(found: Row | None, form: str = "+.4f") -> str:
    return NOTHING if found is None else interval_text(found["value"], found["low"], found["high"], form)


def _p(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.3g}"


EFFECTS: dict[str, Callable[[Row], str]] = {
    "factor": lambda row: row["factor"],
    "level": lambda row: row["level"],
    "runs": lambda row: str(row["runs"]),
    "effect [95 % interval]": lambda row: _interval(row["least_squares"]),
    "Huber's [95 % interval]": lambda row: _interval(row["robust"]),
    "fell behind": lambda row: str(row["behind"]),
}
VARIANCE: dict[str, Callable[[Row], str]] = {
    "term": lambda row: row["term"],
    "degrees": lambda row: str(row["degrees"]),
    "share": lambda row: f"{row['share']:.1%}",
    "F": lambda row: NOTHING if math.isnan(row["f"]) else f"{row['f']:.2f}",
    "p": lambda row: _p(row["p"]),
}
PRIMARY: dict[str, Callable[[Row], str]] = {
    "contrast": lambda row: row["name"],
    "of": lambda row: row["formula"],
    "difference [95 % interval]": lambda row: _interval(row["estimate"]),
    "Huber's [95 % interval]": lambda row: _interval(row["robust"]),
    "p": lambda row: _p(row["estimate"]["p"]) if row["estimate"] else NOTHING,
    "adjusted p": lambda row: _p(row["adjusted"]) if row["estimate"] else NOTHING,
}
PREDICTIONS: dict[str, Callable[[Row], str]] = {
    "schedule": lambda row: row["name"],
    "levels": lambda row: ", ".join(row["levels"]),
    "predicted [95 % interval]": lambda row: _interval(row["estimate"], ".4f"),
    "measured": lambda row: NOTHING if row["measured"] is None else f"{row['measured']:.4f}",
}
SECTIONS = {
    "effects": ("Effects of levels", EFFECTS),
    "primary": ("Primary contrasts", PRIMARY),
    "variance": ("Analysis of variance", VARIANCE),
    "predictions": ("Predicted", PREDICTIONS),
}
"""Titles and columns, in the page's order."""


# ---------------------------------------------------------------------- pictures


def draw(view: View, folder: Path) -> dict[str, Path | None]:
    """Draw the effects of levels, interactions, and what is predicted against what was measured.

    Returns:
        The file of each picture; None without figures for it.
    """
    files = {name: folder / f"{name}.png" for name in ("effects", "interactions", "predicted")}
    found, value = analyze_designs(view), view.describe_measure(view.measure)
    drawn = {
        "effects": _draw_effects(found, files["effects"], value),
        "interactions": _draw_interactions(found, files["interactions"], value),
        "predicted": _draw_predicted(found, files["predicted"], value),
    }
    for name, file in files.items():
        if not drawn[name]:
            file.unlink(missing_ok=True)  # of an earlier report
    return {name: file if drawn[name] else None for name, file in files.items()}


def _draw_effects(analysed: dict[str, Effects], path: Path, value: str) -> bool:
    """A panel for each factor: the effect of each level, by both fits; all on one scale."""
    shown = [
        (name, effects, factor) for name, effects in analysed.items() for factor in effects.design.factors
    ]
    if not shown:
        return False
    titles = [": ".join(filter(None, (name, factor.name))) for name, _, factor in shown]
    with panel_axes(path, titles, columns=4, width=2.8, sharey=True) as axes:
        for axis, (_, effects, factor) in zip(axes, shown, strict=True):
            of_factor = [each for each in effects.levels if each.factor == factor.name]
            axis.axhline(0, color="gray", linewidth=0.8)
            for place, (label, marker, key) in enumerate(
                (("least squares, 95 %", "o-", "least_squares"), ("Huber, 95 %", "s--", "robust"))
            ):
                estimates: list[Estimate | None] = [getattr(each, key) for each in of_factor]
                points = [(x, each) for x, each in enumerate(estimates) if each is not None]
                if points:
                    axis.errorbar(
                        [x + 0.12 * place for x, _ in points],
                        [each.value for _, each in points],
                        yerr=[(each.high - each.low) / 2 for _, each in points],
                        fmt=marker,
                        capsize=3,
                        label=label,
                        alpha=1 - 0.4 * place,
                    )
            axis.set_xticks(range(len(factor.levels)), factor.levels)
            axis.set_xlim(-0.5, len(factor.levels) - 0.5)
            axis.set_xlabel("heads" if factor.layers else "level")
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(f"effect on {value}")
    return True


def _draw_interactions(analysed: dict[str, Effects], path: Path, value: str) -> bool:
    """For pairs of factors: means of runs by the levels of one, a line for each level of the other."""
    shown = [
        (name, effects, pair)
        for name, effects in analysed.items()
        for pair in list(effects.interactions)[:MOST_INTERACTIONS]
    ]
    if not shown:
        return False
    titles = [": ".join(filter(None, (name, effects.name_term(pair)))) for name, effects, pair in shown]
    with panel_axes(path, titles, columns=3, legend=False) as axes:
        for axis, (_, effects, (one, other)) in zip(axes, shown, strict=True):
            means = effects.interactions[one, other]
            factors = effects.design.factors
            for level, line in enumerate(means):
                style = line_style(level, len(means))
                axis.plot(range(len(line)), line, label=factors[one].levels[level], **style)
            axis.set_xticks(range(means.shape[1]), factors[other].levels)
            axis.set(xlabel=factors[other].name, ylabel=value)
            axis.legend(title=factors[one].name, fontsize="x-small", title_fontsize="x-small")
    return True


def _draw_predicted(analysed: dict[str, Effects], path: Path, value: str) -> bool:
    """What the additive model predicts for each combination against the mean of its runs."""
    if not analysed:
        return False
    with panel_axes(path, list(analysed), columns=3, legend=False) as axes:
        for axis, effects in zip(axes, analysed.values(), strict=True):
            points = list(effects.fitted.values())
            axis.plot(*zip(*points, strict=True), "o", markerfacecolor="none", alpha=0.7)
            low, high = min(map(min, points)), max(map(max, points))
            axis.plot([low, high], [low, high], color="gray", linewidth=0.8)
            axis.set(xlabel=f"predicted {value}", ylabel="measured")
    return True
