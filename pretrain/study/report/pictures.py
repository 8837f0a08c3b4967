"""The pictures of a report, in the forms of the papers. Lines differ in style and marker, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pretrain.study.report.compared import (
    draw_gap_by_scale,
    draw_gap_over_tokens,
    draw_results,
    draw_schedules,
)
from pretrain.study.report.growing import draw_growing_heads
from pretrain.study.report.measured import draw_distances, draw_scores
from pretrain.study.report.over_cost import draw_by_flops, draw_by_parameters, draw_by_total_heads
from pretrain.study.summaries import View

PICTURES: dict[str, Callable[[View, Path], str]] = {
    "schedules": draw_schedules,
    "growing_heads": draw_growing_heads,
    "results": draw_results,
    "gap_over_tokens": draw_gap_over_tokens,
    "gap_by_scale": draw_gap_by_scale,
    "total_heads": draw_by_total_heads,
    "training_flops": draw_by_flops,
    "parameters": draw_by_parameters,
    "attention_distance": draw_distances,
    "scores": draw_scores,
}
"""By name; each draws into a file, or returns why it does not. Captions are in the page's template."""


def draw_all(view: View, folder: Path) -> dict[Path, str]:
    """Draw every picture that the finished runs have figures for.

    Returns:
        The file of each picture, and why there is none; empty for those that were drawn.

    Raises:
        UserError: a picture cannot be written.
    """
    found = {folder / f"{name}.png": draw(view, folder / f"{name}.png") for name, draw in PICTURES.items()}
    for path, reason in found.items():
        if reason:
            path.unlink(missing_ok=True)  # of an earlier report
    return found
