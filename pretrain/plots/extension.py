"""Plots as an extension of a run: its curves, drawn at its end."""

from __future__ import annotations

from pretrain.metrics.file import FILE_NAME
from pretrain.plots.command import draw_runs
from pretrain.run.extension import Extension
from pretrain.run.session import Session
from pretrain.utils.text import labelled


class Plotting(Extension):
    """What plots bring to a run."""

    name = "plots"

    def closing(self, session: Session) -> list[str]:
        """Draw the curves, unless the last session of a finished run has."""
        folder = session.run.folder
        picture = folder / "plots" / "training.png"
        if not (folder / FILE_NAME).is_file() or (
            session.finished and not session.hooks and picture.is_file()
        ):
            return []
        return [labelled("plots", f"{draw_runs([folder], picture)}")]
