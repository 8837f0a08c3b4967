"""The report of a study: one page of HTML with everything in it, its pictures, and all numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader

from pretrain.metrics.file import encoded
from pretrain.study.comparable import check_comparable
from pretrain.study.pairing import pairing_lines
from pretrain.study.report.contrasts import contrast_notes, contrasted
from pretrain.study.report.numbers import numbers
from pretrain.study.report.pictures import draw_all
from pretrain.study.report.summaries import CONFIDENCE, OTHER_SEEDS, Sample, View
from pretrain.study.report.tables import interval_text, sections
from pretrain.study.results import RunResult, unnamed_line, unnamed_runs
from pretrain.study.study_file import Study
from pretrain.utils.files import write_atomically
from pretrain.utils.tables import aligned

FOLDER = "report"
TEMPLATE = "page.html.j2"


def view_of(study: Study, results: list[RunResult], folder: Path) -> View:
    """The study's results, if they may be compared.

    Args:
        results: of load_results.
        folder: the study's.

    Raises:
        UserError: runs of one comparison were validated on different texts.
    """
    return View(study, results, check_comparable(study, results), unnamed_runs(study, folder))


def write_report(view: View, folder: Path) -> list[Path]:
    """Write the report of what is finished into ``folder/report``, in place of an earlier one.

    The same runs give the same bytes, apart from throughput.

    Returns:
        The files written: ``index.html``, which needs no other, ``results.json`` and the pictures.

    Raises:
        UserError: a picture cannot be written.
        OSError: another file cannot be written.
    """
    out = folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    tables, pictures = sections(view), draw_all(view, out)
    drawn = [picture for picture in pictures if not picture.left_out]
    left_out = [f"{section.title}: {reason}." for section in tables for reason in section.left_out]
    left_out += [f"{picture.path.name}: {picture.left_out}." for picture in pictures if picture.left_out]
    templates = Environment(
        loader=PackageLoader("pretrain.study.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template(TEMPLATE).render(
        title=view.study.title, opening=opening(view), sections=tables, pictures=drawn, left_out=left_out
    )
    files = {
        "index.html": page,
        "results.json": json.dumps(encoded(numbers(view)), indent=1, ensure_ascii=False) + "\n",
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [*(out / name for name in files), *(picture.path for picture in drawn)]


def terminal_lines(view: View) -> Iterator[str]:
    """What the report begins with, and its first tables: the results and the study's contrasts."""
    yield view.study.title
    for heading, lines in opening(view).items():
        yield from ["", heading, *(f"  {line}" for line in lines)] if lines else []
    for section in sections(view)[:2]:
        for table in section.tables:
            yield from ["", section.title + f", {table.title}" * bool(table.title)]
            yield from aligned([list(table.frame.columns), *table.frame.to_numpy().tolist()], left={0, 1})


def opening(view: View) -> dict[str, list[str]]:
    """What is compared, how much of it there is, and what to know before reading: headings with their lines."""
    study = view.study
    compared = []
    for comparison in study.comparisons:
        others = [variant.name for variant in comparison.variants if variant.name != comparison.baseline]
        compared.append(f"{_of(comparison.name)}{', '.join(others) or 'nothing'} with {comparison.baseline}")
    compared += [f"contrast {contrast.described}" for contrast in study.contrasts]
    missing = view.without_result(view.every)
    seeds = ", ".join(map(str, study.seeds))
    size = f" Its size was chosen for {study.machine}." if study.machine else ""
    runs = [
        f"{len(study.runs) - len(missing)} of {len(study.runs)} runs are finished ({len(view.every)} variants, "
        f"seeds {seeds}).{size}"
    ]
    if view.measure != study.measure:
        runs.append(f"The study asks for {study.measure}; {view.measure} is compared instead.")
    if view.unnamed:
        runs.append(f"{_sentence(unnamed_line(view.unnamed))} They are in no figure.")
    return {
        "What is compared": [*compared, f"By {view.described(view.measure)}; {view.better} is better."],
        "Status": runs,
        "Not finished": [f"{line}." for line in missing],
        "Caveats": [f"{note}." for note in (*view.comparability.notes, *contrast_notes(view))],
        "What pairs share": [f"{line}." for line in pairing_lines(study)],
        "What the intervals say": intervals_say(view),
    }


def intervals_say(view: View) -> list[str]:
    """A line for each difference and each contrast, and how many intervals would exclude zero by chance."""
    said: list[tuple[str, Sample, str, bool, str]] = [
        (
            f"{_of(summary.comparison.name)}{summary.variant} − {summary.baseline}",
            summary.differences,
            "pair",
            summary.other_seeds,
            f" than {summary.baseline}",
        )
        for summary in view.compared
    ]
    said += [
        (f"contrast {found.contrast.described}", found.values, "seed", found.other_seeds, "")
        for found in contrasted(view)
        if found.values
    ]
    lines = [_said(*each) for each in said]
    intervals = [values.interval for _, values, *_ in said if values.interval]
    if not intervals:
        return [*lines, "No interval: each needs two pairs of finished runs."]
    made, excluding = len(intervals), sum(interval.excludes_zero for interval in intervals)
    lines.append(
        f"{_counted(made, 'comparison')} made; {_counted(excluding, 'interval')} exclude{'s' * (excluding == 1)} "
        f"zero. If nothing differed, {made * (1 - CONFIDENCE):.2g} of {made} would do so by chance, on average: "
        "at 95 %, one in twenty. Intervals that share runs err together, and none is adjusted for their number."
    )
    return lines


def _said(name: str, values: Sample, what: str, other_seeds: bool, than: str) -> str:
    """What the interval of one difference says; *than* what it is higher or lower, if that is one variant."""
    special = f" {_sentence(OTHER_SEEDS)}" * other_seeds
    count, interval = _counted(len(values), what), values.interval
    if interval is None:
        return f"{name}: {count}, no interval.{special}"
    where = "excludes zero" if interval.excludes_zero else "includes zero"
    if interval.excludes_zero and than:
        where += f": {'higher' if interval.mean > 0 else 'lower'}{than}"
    return f"{name}: {interval_text(interval)}, {count}. The interval {where}.{special}"


def _of(comparison: str) -> str:
    """The beginning of a line about one of several comparisons."""
    return f"{comparison}: " if comparison else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
