"""How Sphinx builds the documentation site: ``make docs``, into build/site/.

The pages are those that one reads in the repository, at their places, so links hold in both. Added are a
table of contents under the landing page, and docs/reference/, which docs/reference.py generates from the
code.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.reference import write_reference  # noqa: E402

project = "head-schedules"
author = copyright = "The head-schedules authors"
version = release = importlib.metadata.version("head-schedules")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "docs/**.md",
    "examples/README.md",
    "benchmarks/tokenization.md",
]
root_doc = "README"
html_theme = "furo"
html_title = "head-schedules"
html_theme_options = {"navigation_with_keys": True}
highlight_language = "none"
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

CONTENTS = {
    "Start": [
        "docs/tutorial",
        "docs/tutorial_study",
        "docs/tutorial_slurm",
        "docs/configuration",
        "examples/README",
    ],
    "How to": [
        "docs/data",
        "docs/checkpoints",
        "docs/cluster",
        "docs/huggingface",
        "docs/studies",
        "docs/diagnostics",
        "docs/classification",
        "docs/troubleshooting",
        "docs/adding_an_architecture",
    ],
    "Reference": [
        "docs/reference/settings",
        "docs/reference/commands",
        "docs/reference/flags",
        "docs/reference/library",
        "docs/numbers",
        "docs/glossary",
    ],
    "Explanations": [
        "docs/how_resuming",
        "docs/how_tensor_parallelism",
        "docs/tensor_parallelism",
        "docs/context_parallelism",
        "docs/learning_rates",
        "docs/allocation",
        "docs/muon",
        "docs/growth",
        "docs/memory",
        "docs/performance",
        "docs/architecture",
        "docs/decisions",
    ],
    "Results": ["docs/results", "docs/log/README"],
    "Project": ["docs/README", "AGENTS", "CONTRIBUTING", "CHANGELOG", "benchmarks/tokenization"],
}


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *map("/{}".format, pages), "```"]
    )


def _add_contents(app: Any, name: str, source: list[str]) -> None:
    """Under the landing page, and under the log's, whose entries are in no other list."""
    if name == "README":
        source[0] += "".join(_toctree(caption, pages) for caption, pages in CONTENTS.items())
    if name == "docs/log/README":
        entries = sorted(path.stem for path in (ROOT / "docs/log").glob("*.md") if path.stem != "README")
        source[0] += _toctree("Log", [f"docs/log/{entry}" for entry in entries])


def _begin_at_the_landing_page(app: Any, error: Exception | None) -> None:
    leads = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">'
    (Path(app.outdir) / "index.html").write_text(f'{leads}<a href="README.html">head-schedules</a>\n')


def setup(app: Any) -> None:
    """Called by Sphinx."""
    write_reference(ROOT / "docs" / "reference")
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _begin_at_the_landing_page)
