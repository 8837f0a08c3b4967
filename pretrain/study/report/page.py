"""The report of a study: one page of HTML with everything in it, the same as Markdown, and all numbers as JSON."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.metrics.file import encoded
from pretrain.study.comparable import check_comparable
from pretrain.study.pairing import pairing_lines
from pretrain.study.report.contrasts import contrast_notes, contrasted
from pretrain.study.report.pictures import Picture, draw_all
from pretrain.study.report.summaries import (
    CONFIDENCE,
    OTHER_SEEDS,
    Summary,
    View,
    distance_differences,
    explanation,
    gap_over_tokens,
    score_keys,
    tokens_saved,
)
from pretrain.study.report.tables import Section, Table, interval_text, sections
from pretrain.study.results import RunResult, unnamed_line, unnamed_runs
from pretrain.study.statistics import Interval
from pretrain.study.study_file import Study
from pretrain.utils.files import write_atomically

FOLDER = "report"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
td { font-variant-numeric: tabular-nums; }
.note { font-size: .85rem; color: #444; max-width: 60rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; } figcaption { font-size: .85rem; color: #444; }
"""


@dataclass(frozen=True)
class _Page:
    """What Markdown and HTML print alike."""

    title: str
    opening: list[tuple[str, list[str]]]
    """Headings with their lines; those without any are not printed."""
    sections: list[Section]
    pictures: list[Picture]

    @property
    def drawn(self) -> list[Picture]:
        """The pictures that there are."""
        return [picture for picture in self.pictures if not picture.left_out]

    @property
    def left_out(self) -> list[str]:
        """What there are no figures for, each with its reason."""
        lines = [f"{section.title}: {reason}." for section in self.sections for reason in section.left_out]
        return lines + [
            f"{picture.file}: {picture.left_out}." for picture in self.pictures if picture.left_out
        ]


def write_report(study: Study, results: list[RunResult], folder: Path) -> list[Path]:
    """Write the report of what is finished into ``folder/report``, in place of an earlier one.

    The same runs give the same bytes, apart from throughput.

    Args:
        results: of load_results.
        folder: the study's.

    Returns:
        The files written: ``index.html``, which needs no other, ``report.md``, ``results.json`` and the pictures.

    Raises:
        UserError: runs of one comparison were validated on different texts, or a picture cannot be written.
        OSError: another file cannot be written.
    """
    view = View(study, results, check_comparable(study, results), unnamed_runs(study, folder))
    out = folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    page = _Page(study.title, opening(view), sections(view), draw_all(view, out))
    files = {
        "index.html": _html(page, out),
        "report.md": _markdown(page),
        "results.json": json.dumps(encoded(numbers(view)), indent=1, ensure_ascii=False) + "\n",
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in [*files, *(picture.file for picture in page.drawn)]]


# ---------------------------------------------------------------------- what the page says first


def opening(view: View) -> list[tuple[str, list[str]]]:
    """What is compared, how much of it there is, and what to know before reading: headings with their lines."""
    study = view.study
    compared = []
    for comparison in study.comparisons:
        others = [variant.name for variant in comparison.variants if variant.name != comparison.baseline]
        name = f"{comparison.name}: " if comparison.name else ""
        compared.append(f"{name}{', '.join(others) or 'nothing'} with {comparison.baseline}")
    compared += [f"contrast {contrast.described}" for contrast in study.contrasts]
    missing = view.without_result
    finished = f"{len(study.runs) - len(missing)} of {len(study.runs)} runs are finished"
    seeds = ", ".join(map(str, study.seeds))
    size = f" Its size was chosen for {study.machine}." if study.machine else ""
    lines = [f"{finished} ({sum(map(len, view.summaries.values()))} variants, seeds {seeds}).{size}"]
    if view.measure != study.measure:
        lines.append(f"The study asks for {study.measure}; {view.measure} is compared instead.")
    if view.unnamed:
        beside = unnamed_line(view.unnamed)
        lines.append(f"{beside[0].upper()}{beside[1:]}. They are in no figure.")
    notes = [*view.comparability.notes, *contrast_notes(view)]
    paired = [f"{line}." for line in pairing_lines(study)]
    return [
        ("What is compared", [*compared, f"By {view.described(view.measure)}; {view.better} is better."]),
        ("What there is", lines),
        ("Not finished", [f"{line}." for line in missing]),
        ("To know before comparing", [f"{note}." for note in notes]),
        ("What pairs share", paired),
        ("What the intervals say", intervals_say(view)),
    ]


def intervals_say(view: View) -> list[str]:
    """A line for each difference and each contrast, and how many intervals would exclude zero by chance."""
    lines = []
    for summary in view.compared:
        name = f"{summary.comparison.name}: " if summary.comparison.name else ""
        name += f"{summary.variant} − {summary.baseline}"
        count = _counted(len(summary.differences), "pair")
        lines.append(_said(name, summary.interval, count, summary.other_seeds, f" than {summary.baseline}"))
    contrasts = [found for found in contrasted(view) if found.values]
    for found in contrasts:
        name = f"contrast {found.contrast.described}"
        lines.append(_said(name, found.interval, _counted(len(found.values), "seed"), found.other_seeds))
    every = [summary.interval for summary in view.compared] + [found.interval for found in contrasts]
    intervals = [interval for interval in every if interval]
    if not intervals:
        return [*lines, "No interval: each needs two pairs of finished runs."]
    made, excluding = len(intervals), sum(interval.excludes_zero for interval in intervals)
    lines.append(
        f"{_counted(made, 'comparison')} made; {_counted(excluding, 'interval')} exclude{'s' * (excluding == 1)} zero. "
        f"If nothing differed, {made * (1 - CONFIDENCE):.2g} of {made} would do so by chance, on average: at 95 %, one "
        "in twenty. Intervals that share runs err together, and none is adjusted for their number."
    )
    return lines


def _said(name: str, interval: Interval | None, count: str, other_seeds: bool, than: str = "") -> str:
    """What the interval of one difference says; *than* what it is higher or lower, if that is one variant."""
    special = f" {OTHER_SEEDS[0].upper()}{OTHER_SEEDS[1:]}." * other_seeds
    if interval is None:
        return f"{name}: {count}, no interval.{special}"
    where = "excludes zero" if interval.excludes_zero else "includes zero"
    if interval.excludes_zero and than:
        where += f": {'higher' if interval.mean > 0 else 'lower'}{than}"
    return f"{name}: {interval_text(interval)}, {count}. The interval {where}.{special}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# ---------------------------------------------------------------------- Markdown and HTML


def _markdown(page: _Page) -> str:
    parts = [f"# {_escaped(page.title)}"]
    for title, lines in page.opening:
        if lines:
            parts += [f"## {title}", "\n".join(f"- {_escaped(line)}" for line in lines)]
    for section in page.sections:
        if section.tables:
            parts += [f"## {section.title}", *map(_escaped, section.notes)]
            parts += [_markdown_table(table) for table in section.tables]
    if page.drawn:
        parts.append("## Figures")
    parts += [f"![{picture.title}]({picture.file})\n\n{picture.caption}" for picture in page.drawn]
    if page.left_out:
        parts += ["## Left out", "\n".join(f"- {_escaped(line)}" for line in page.left_out)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    title = f"### {_escaped(table.title)}\n\n" * bool(table.title)
    body = "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)
    return title + body + "".join(f"\n\n{_escaped(note)}" for note in table.notes)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: names may hold underscores, stars and bars."""
    text = re.sub(r"[\\`*|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(text, quote=False))
    return re.sub(r"\](?=[\[(])", r"]\\", text)  # would be a link


def _html(page: _Page, out: Path) -> str:
    title = html.escape(page.title)
    parts = [f"<h1>{title}</h1>"]
    for heading, lines in page.opening:
        parts += [f"<h2>{heading}</h2>", _list(lines)] if lines else []
    for section in page.sections:
        if section.tables:
            parts.append(f"<h2>{html.escape(section.title)}</h2>")
            parts += [f'<p class="note">{html.escape(note)}</p>' for note in section.notes]
            parts += [_html_table(table) for table in section.tables]
    parts += ["<h2>Figures</h2>"] * bool(page.drawn)
    for picture in page.drawn:
        image = base64.b64encode((out / picture.file).read_bytes()).decode("ascii")
        caption = html.escape(picture.caption)
        parts.append(
            f'<figure><h3>{html.escape(picture.title)}</h3><img alt="{caption}" src="data:image/png;base64,{image}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    parts += ["<h2>Left out</h2>", _list(page.left_out)] if page.left_out else []
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _list(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{html.escape(line)}</li>" for line in lines) + "\n</ul>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    title = f"<h3>{html.escape(table.title)}</h3>\n" * bool(table.title)
    notes = "".join(f'\n<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return (
        f'{title}<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
        f"{notes}"
    )


# ---------------------------------------------------------------------- numbers


def numbers(view: View) -> dict[str, Any]:
    """All numbers of the report, under names; what is not known is None."""
    return {
        "study": view.study.name,
        "title": view.study.title,
        "measure": view.measure,
        "better": view.better,
        "last_validations": view.last,
        "confidence": CONFIDENCE,
        "notes": [*view.comparability.notes, *contrast_notes(view)],
        "unnamed_runs": list(view.unnamed),
        "runs": [_run_numbers(view, run) for run in view.results],
        "comparisons": [
            {
                "name": name,
                "baseline": summaries[0].comparison.baseline,
                "variants": [_variant_numbers(view, summary) for summary in summaries],
                "explanation": _explanation_numbers(view, name),
            }
            for name, summaries in view.summaries.items()
        ],
        "contrasts": [found.numbers() for found in contrasted(view)],
    }


def _run_numbers(view: View, run: RunResult) -> dict[str, Any]:
    return {
        "name": run.planned.name,
        "comparison": run.comparison,
        "variant": run.variant,
        "seed": run.seed,
        "trained_with": run.planned.run.seed,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "result": run.result(view.measure, view.last),
        "heads": list(run.model_config.heads) if run.model_config else None,
        "code": run.world.get("code"),
    }


def _variant_numbers(view: View, summary: Summary) -> dict[str, Any]:
    found = summary.interval
    keys = score_keys([summary])
    return {
        "name": summary.variant,
        "baseline": None if summary.is_baseline else summary.baseline,
        "other_seeds": summary.other_seeds,
        "schedules": [list(schedule) for schedule in summary.schedules],
        "values": summary.values,
        "mean": summary.mean,
        "sd": summary.sd,
        "differences": summary.differences,
        "mean_difference": summary.mean_difference,
        "interval": asdict(found) if found else None,
        "excludes_zero": found.excludes_zero if found else None,
        "detectable_difference": summary.detectable,
        "tokens_per_second": summary.tokens_per_second,
        "parameters": summary.parameters,
        "training_flops": summary.training_flops,
        "tokens_saved": tokens_saved(view, summary),
        "gap_over_tokens": {} if summary.is_baseline else gap_over_tokens(view, summary),
        "attention_distance_differences": {} if summary.is_baseline else distance_differences(view, summary),
        "scores": {
            key: {seed: run.result(key) for seed, run in summary.runs.items() if run.result(key) is not None}
            for key in keys
        },
        "score_differences": {key: view.difference_of(summary, key) for key in keys},
    }


def _explanation_numbers(view: View, comparison: str) -> dict[str, Any]:
    found, left_out = explanation(view, comparison)
    return {
        "features": found.features,
        "mean_differences": found.outcome,
        "left_out": left_out,
        "regression": asdict(found.regression) if found.regression else None,
        "reason": found.reason,
    }
