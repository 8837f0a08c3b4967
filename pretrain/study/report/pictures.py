"""The pictures of a report, in the forms of the papers. Lines differ in style and marker too, so greyscale will do."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
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
from pretrain.study.report.summaries import View


@dataclass(frozen=True)
class Picture:
    """A picture of the report, or why there is none."""

    path: Path
    title: str
    caption: str
    left_out: str = ""

    def base64(self) -> str:
        """The file, as a page holds it."""
        return base64.b64encode(self.path.read_bytes()).decode("ascii")


def draw_all(view: View, folder: Path) -> list[Picture]:
    """Draw every picture that the finished runs have figures for; the others say why they are left out.

    Raises:
        UserError: a picture cannot be written.
    """
    found = []
    for name, (title, caption, draw) in PICTURES.items():
        path = folder / f"{name}.png"
        reason = draw(view, path)
        if reason:
            path.unlink(missing_ok=True)  # of an earlier report
        found.append(Picture(path, title, caption, reason))
    return found


PICTURES: dict[str, tuple[str, str, Callable[[View, Path], str]]] = {
    "schedules": (
        "Schedules",
        "Heads by layer. Lines are moved up or down a little, so that none hides another; ticks are at the true "
        "counts. As figure 1 of arXiv 2606.27449.",
        draw_schedules,
    ),
    "growing_heads": (
        "Heads that grow",
        "Heads of each layer over training. Thick: mean over the seeds; thin: each run. Lines are moved up or "
        "down a little, so that none hides another.",
        draw_growing_heads,
    ),
    "results": (
        "Results",
        "Left: every seed's result, and the mean. Right: the differences of the pairs, and their mean with its "
        "95 % t-interval.",
        draw_results,
    ),
    "gap_over_tokens": (
        "Gap over tokens",
        "Validation loss less that of the baseline's run of the same seed, at every validation. Of many lines the "
        "spread is shown at the right, of the last one. As figure 3a of arXiv 2606.27449.",
        draw_gap_over_tokens,
    ),
    "gap_by_scale": (
        "Gap by scale",
        "Mean difference with its 95 % t-interval over the parameters of the model. As figure 3b of arXiv "
        "2606.27449.",
        draw_gap_by_scale,
    ),
    "total_heads": (
        "Results by total heads",
        "Ascending, constant and descending schedules over the number of heads that their layers have together, "
        "as in the head-progression note. Lines join means over the seeds, and are moved sideways a little.",
        draw_by_total_heads,
    ),
    "training_flops": (
        "Results by training FLOPs",
        "Filled: means over the seeds. Runs whose heads grow count with the FLOPs that they took.",
        draw_by_flops,
    ),
    "parameters": (
        "Results by parameters",
        "Filled: means over the seeds. Of runs whose heads grow, the parameters at the end.",
        draw_by_parameters,
    ),
    "attention_distance": (
        "Attention distance",
        "Mean distance of what attention reads, by layer, at the last measurement of each run; right: less that "
        "of the baseline's run of the same seed. Many lines are moved sideways a little. As figure 4 of arXiv "
        "2606.27449.",
        draw_distances,
    ),
    "scores": (
        "Zero-shot scores",
        "Mean over the seeds with its standard deviation; the baseline is darker. Bars begin at zero. As figure 2 "
        "of arXiv 2606.27449.",
        draw_scores,
    ),
}
