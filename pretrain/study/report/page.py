"""The report of a study: one page of HTML with everything in it, and its pictures."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from pretrain.study.register import describe_expectations
from pretrain.study.report.pictures import draw_all
from pretrain.study.report.tables import sections
from pretrain.study.results import describe_unnamed
from pretrain.study.statistics.paired import FAR
from pretrain.study.summaries import View
from pretrain.utils.files import write_atomically
from pretrain.utils.format import align_columns, count_of, shorten_names

ON_A_TERMINAL = {"effects", "variance", "predictions", "results", "contrasts"}


def write_report(view: View) -> list[Path]:
    """Write the report of what is finished into ``report`` in the study's folder, in place of an earlier one.

    The same runs give the same bytes.

    Returns:
        The files written: ``index.html``, which needs no other, and the pictures.

    Raises:
        UserError: a picture cannot be written.
        OSError: another file cannot be written.
    """
    out = view.study.folder / "report"
    out.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(view, out)
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    templates = Environment(loader=PackageLoader("pretrain.study.report", ""), autoescape=True, **blocks)
    page = templates.get_template("page.html.j2").render(
        view=view,
        opening=describe_opening(view),
        sections=sections(view),
        pictures={name: base64.b64encode(path.read_bytes()).decode("ascii") for name, path in drawn.items()},
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
    compared = [study.design.described] if study.design else []
    missing = [run for each in view.summaries for seed, run in each.runs.items() if seed not in each.values]
    begun = [f"{run.described}." for run in missing if run.state != "missing"]
    absent = [run.planned.name for run in missing if run.state == "missing"]
    seeds = ", ".join(map(str, study.file.seeds))
    finished = f"{len(study.runs) - len(missing)} of {len(study.runs)} runs are finished"
    runs = [f"{finished} ({count_of(len(view.summaries), 'variant')}, seeds: {seeds})."]
    if unnamed := describe_unnamed(study):
        runs.append(f"Left out: {unnamed}.")
    return {
        "Question": describe_expectations(study),
        "What is compared": [*compared, f"By {view.value}; {view.better} is better."],
        "Status": runs,
        "Not finished": begun + ([f"Not begun: {shorten_names(absent)}."] if absent else []),
        "Outliers": describe_outliers(view),
        "Effects": list(describe_design(view)),
        "Caveats": [f"{note}." for note in view.caveats],
    }


def describe_design(view: View) -> Iterator[str]:
    """What to know before reading the tables: sentences."""
    if view.effects and view.effects.unknown:
        yield f"No analysis yet: {view.effects.unknown}."
    if (effects := view.analysis) is None:
        return
    if unseen := [each.contrast.name for each in view.contrasted if each.fits is None]:
        yield f"{', '.join(unseen)}: not known; so few runs do not show interactions."
    fit = effects.least_squares
    yield f"Residual sd {math.sqrt(fit.scale):.4f} on {fit.df_resid:.0f} degrees of freedom."
    if effects.lack_of_fit is not None:  # it takes two seeds, and more runs than terms
        yield "Lack of fit: F = {:.2f}, p = {:.3g}.".format(*effects.lack_of_fit)


def describe_outliers(view: View) -> list[str]:
    """Which runs are outliers, by the rule that is stated; none is dropped."""
    fit = "the robust fit" if view.effects else "the median of their variant"
    rule = f"worse than {fit} by more than {FAR:g} robust standard deviations; they are in every number"
    count = f"{len(view.outliers)} of {sum(len(each.values) for each in view.summaries)}"
    return [f"{count} ({rule}): {', '.join(sorted(view.outliers))}."] if view.outliers else []
