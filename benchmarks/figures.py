"""What benchmarks share that write their figures to a file as well."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pretrain.utils.files import write_atomically

MAIN_FLAGS = "Flags of pretrain/main.py may follow (python pretrain/main.py --help)."
"""Under the help of benchmarks that hand on what they do not know."""


def add_out(parser: argparse.ArgumentParser) -> None:
    """The flag --out."""
    parser.add_argument("--out", metavar="FILE.json", help="write all figures as JSON, too")


def write(out: str | None, figures: Any) -> None:
    """Write *figures* to *out*, if one was given; whole or not at all, since a benchmark may be cut off."""
    if out is None:
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(figures, indent=1) + "\n")
