"""What the small corpus of tests/conftest.py is made of, and real data that is not on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from pretrain.prepare.sources.plain_files import PlainFiles

SMALL_VOCABULARY = 600
GPT2_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gpt2"
WIKITEXT = GPT2_FOLDER.parent / "wikitext2-valid.txt"


def small_paths() -> list[Path]:
    """About 40 files, 0.5 MB: packages that every Python has."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for name in ("json", "email", "html") for path in sorted((library / name).glob("*.py"))]


def small_source(count: int | None = None) -> PlainFiles:
    """The first *count* of the small paths, or all, as a source."""
    return PlainFiles("text", [(path.name, path) for path in small_paths()[:count]])
