"""How Sphinx builds the documentation site: ``make docs``, into build/site/.

The pages are those that one reads in the repository, at their places, so links hold in both. The landing
page is docs/index.md, with the table of contents from below. docs/reference.py generates docs/reference/ from
the code.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.reference import write_reference  # noqa: E402

project = "head-schedules"
author = copyright = "The head-schedules authors"
version = importlib.metadata.version("head-schedules")


def _find_release() -> str:
    """The version, with the commit where that is not the one of the version's tag."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--tags"], capture_output=True, text=True
    ).stdout.strip()
    return version if described in ("", f"v{version}") else f"{version}+{described.rpartition('-g')[2]}"


release = _find_release()
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "docs/**.md",
    "examples/README.md",
    "benchmarks/tokenization.md",
    "results/*.md",
]
root_doc = "docs/index"
html_theme = "furo"
html_title = f"head-schedules {release}"  # on every page, so that readers see what it is about
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_use_index = False  # the search finds what it would list
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # text is output
highlight_language = "none"
myst_heading_anchors = 3
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
autodoc_type_aliases = {"NonNegativeInt": "int", "NonNegativeFloat": "float", "ReadableSettings": "dict"}
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

CONTENTS = {
    "Start": [
        "Tutorial: your own model <docs/tutorial>",
        "Tutorial: a study <docs/tutorial_study>",
        "Tutorial: SLURM <docs/tutorial_slurm>",
        "docs/configuration",
        "docs/data",
        "docs/troubleshooting",
    ],
    "Models and training": [
        "Heads and widths by layer <docs/allocation>",
        "docs/learning_rates",
        "docs/muon",
        "Growing and pruning heads <docs/growth>",
        "docs/classification",
        "docs/checkpoints",
        "Hugging Face <docs/huggingface>",
        "examples/README",
    ],
    "Studies and measurements": [
        "Studies <docs/studies>",
        "docs/diagnostics",
        "docs/numbers",
        "docs/results",
    ],
    "Many GPUs": [
        "Planning a run <docs/memory>",
        "docs/cluster",
        "docs/tensor_parallelism",
        "docs/context_parallelism",
        "docs/performance",
    ],
    "Reference": [
        "docs/reference/settings",
        "docs/reference/commands",
        "docs/reference/library",
        "docs/reference/metrics",
        "docs/reference/hardware",
        "docs/reference/flags",
        "docs/glossary",
    ],
    "How it works": [
        "docs/architecture",
        "docs/how_resuming",
        "Tensor parallelism of any head count <docs/how_tensor_parallelism>",
        "docs/decisions",
        "docs/adding_an_architecture",
    ],
    "Project": [
        "docs/README",
        "Readme <README>",
        "CONTRIBUTING",
        "AGENTS",
        "CHANGELOG",
        "Benchmark: tokenization <benchmarks/tokenization>",
    ],
}
FILE_AS_TEXT = re.compile(r"\[[\w./-]+\.md\](\([\w./-]+\.md(?:#[\w-]+)?\))")


def _toctree(caption: str, pages: list[str]) -> str:
    entries = [re.sub(r"(<|^)(?=[\w/-]+>?$)", r"\1/", page) for page in pages]
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"])


def _change_source(app: Any, name: str, source: list[str]) -> None:
    """Add tables of contents, and give links whose text is the name of a file the title of its page.

    The log is reached from the results and by search: it is in no list but its own, to which its pages lead
    back.
    """
    source[0] = FILE_AS_TEXT.sub(r"[]\1", source[0])
    if name == root_doc:
        source[0] += "".join(_toctree(caption, pages) for caption, pages in CONTENTS.items())
    if name == "docs/results":
        source[0] += _toctree("Studies", sorted(f"results/{path.stem}" for path in ROOT.glob("results/*.md")))
    if name.startswith("docs/log/") and name != "docs/log/README":
        source[0] += "\n\n[All pages of the log](README.md)\n"
    if name == "docs/log/README":
        entries = sorted(path.stem for path in (ROOT / "docs/log").glob("*.md") if path.stem != "README")
        source[0] = "---\norphan: true\n---\n" + source[0]
        source[0] += _toctree("Log", [f"docs/log/{entry}" for entry in entries])


def _begin_at_the_landing_page(app: Any, error: Exception | None) -> None:
    leads = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (Path(app.outdir) / "index.html").write_text(f'{leads}<a href="docs/index.html">head-schedules</a>\n')


def _keep_colons(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon reads the text before a colon as a type, if it is in an attribute's first line."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app: Any) -> None:
    """Called by Sphinx."""
    write_reference(ROOT / "docs" / "reference")
    app.connect("source-read", _change_source)
    app.connect("autodoc-process-docstring", _keep_colons, priority=100)
    app.connect("build-finished", _begin_at_the_landing_page)
