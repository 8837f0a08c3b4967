"""Draws how long the documents of a corpus are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.utils.plotting import saved_figure

LENGTHS_FILE = "document_lengths.png"


def draw_lengths(summary: dict[str, Any], out: Path) -> None:
    """Draw the histogram of ``document_lengths`` as a PNG."""
    histogram = summary["histogram"]
    documents = histogram["documents"]
    edges = 2.0 ** ((histogram["from_2_to_the_eighths"] + np.arange(len(documents) + 1)) / 8)
    with saved_figure(out, "out", size=(7, 4), dpi=120) as (_, axis):
        axis.stairs(documents, edges, fill=True)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in the document, its end included")
        axis.set_ylabel("documents")
        axis.set_title(
            f"mean {summary['mean']:,}, median {summary['p50']:,}, longest {summary['longest']:,} tokens"
        )
