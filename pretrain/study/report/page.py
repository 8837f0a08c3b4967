"""The report of a study: one page of HTML with everything in it, and its pictures."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader

from pretrain.study.register import describe_expectations
from pretrain.study.report.pictures import draw_all
from pretrain.study.report.tables import sections
from pretrain.study.results import describe_unnamed, find_unnamed_runs, shorten_names
from pretrain.study.statistics.paired import CONFIDENCE
from pretrain.study.statistics.ranks import FAR
from pretrain.study.summaries import POWER, View
from pretrain.utils.files import write_atomically
from pretrain.utils.format import align_columns

FOLDER = "report"
ON_A_TERMINAL = {"effects", "variance", "predictions", "results", "contrasts"}
TEMPLATE = "page.html.j2"
MOST_CONFOUNDED = 6
"""Of which names are listed."""


def write_report(view: View) -> list[Path]:
    """Write the report of what is finished into ``report`` in the study's folder, in place of an earlier one.

    The same runs give the same bytes.

    Returns:
        The files written: ``index.html``, which needs no other, and the pictures.

    Raises:
        UserError: a picture cannot be written.
        OSError: another file cannot be written.
    """
    out = view.study.folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(view, out)
    templates = Environment(
        loader=PackageLoader("pretrain.study.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template(TEMPLATE).render(
        view=view,
        opening=describe_opening(view),
        sections=sections(view),
        pictures={name: base64.b64encode(path.read_bytes()).decode("ascii") for name, path in drawn.items()},
        power=POWER,
    )
    write_atomically(out / "index.html", page)
    return [out / "index.html", *drawn.values()]


def terminal_lines(view: View) -> Iterator[str]:
    """What the report begins with, and its first tables: a design's effects, results and contrasts."""
    yield view.study.title
    for heading, lines in describe_opening(view).items():
        yield from ["", heading, *(f"  {line}" for line in lines)] if lines else []
    for name, section in sections(view).items():
        if name in ON_A_TERMINAL and section.rows and not (name == "results" and view.effects):
            yield from ["", section.title, *align_columns(section.table, left={0, 1})]


def describe_opening(view: View) -> dict[str, list[str]]:
    """What is compared, how much of it there is, and what to know first: headings with their lines."""
    study = view.study
    if study.design is not None:
        compared = [study.design.described]
    else:
        others: dict[str, list[str]] = {}
        for name, variant in study.variants.items():
            if variant.control is not None:
                others.setdefault(variant.control, []).append(name)
        compared = [f"{', '.join(names)} with {control}" for control, names in others.items()] or ["nothing"]
    compared += [f"contrast {each.name}: {each.formula}" for each in study.contrasts]
    missing = [run for each in view.summaries for seed, run in each.runs.items() if seed not in each.values]
    begun = [f"{run.described}." for run in missing if run.state != "missing"]
    absent = [run.planned.name for run in missing if run.state == "missing"]
    seeds = ", ".join(map(str, study.file.seeds))
    finished = f"{len(study.runs) - len(missing)} of {len(study.runs)} runs are finished"
    runs = [f"{finished} ({len(view.summaries)} variants, seeds {seeds})."]
    if view.measure != study.file.measure:
        runs.append(f"The study asks for {study.file.measure}; {view.measure} is compared instead.")
    if unnamed := describe_unnamed(find_unnamed_runs(study)):
        runs.append(f"In no figure: {unnamed}.")
    return {
        "Question": describe_expectations(study),
        "What is compared": [
            *compared,
            f"By {view.value}; {view.better} is better.",
        ],
        "Status": runs,
        "Not finished": begun + ([f"Not begun: {shorten_names(absent)}."] if absent else []),
        "Outliers": describe_outliers(view),
        "Effects": list(describe_design(view)),
        "Caveats": [f"{note}." for note in view.caveats],
        "What the intervals say": [describe_intervals(view)] if view.listed else [],
    }


def describe_design(view: View) -> Iterator[str]:
    """What to know before reading the tables: sentences."""
    if view.effects and view.effects.unknown:
        yield f"No analysis yet: {view.effects.unknown}."
    if (effects := view.analysis) is None:
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
    # What is confounded is not estimated apart.
    factors = len(effects.design.levels)
    every = (factors - 1) * (factors - 2) // 2
    if effects.confounded and all(len(others) == every for others in effects.confounded.values()):
        yield "Each main effect is confounded with the interactions of any two other factors."
        return
    for term, others in effects.confounded.items():
        more = f" and {len(others) - MOST_CONFOUNDED} more" if len(others) > MOST_CONFOUNDED else ""
        yield f"Confounded with {term}: {', '.join(others[:MOST_CONFOUNDED])}{more}."


def describe_outliers(view: View) -> list[str]:
    """Which runs are outliers, by the rule that is stated; none is dropped."""
    if not view.outliers:
        return []
    fit = "the robust fit" if view.effects else "the median of their variant"
    rule = f"worse than {fit} by more than {FAR:g} robust standard deviations"
    of_all = len([run for each in view.summaries for run in each.values])
    names = ", ".join(sorted(view.outliers))
    return [f"{len(view.outliers)} of {of_all} ({rule}; they are in every number): {names}."]


def describe_intervals(view: View) -> str:
    """How many intervals of the tables exclude zero, and how many would do so by chance."""
    samples = [summary.differences for summary in view.compared]
    samples += [found.values for found in view.contrasted]
    intervals = [sample.interval for sample in samples if sample.interval]
    if not intervals:
        return "No interval: each needs two pairs of finished runs."
    made, excluding = len(intervals), sum(interval.excludes_zero for interval in intervals)
    return (
        f"{excluding} of {made} intervals exclude zero. If nothing differed, {made * (1 - CONFIDENCE):.2g} "
        "would do so by chance, on average: at 95 %, one in twenty. Intervals that share runs err together, "
        "and none is adjusted for their number."
    )
