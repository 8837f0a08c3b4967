"""The small corpus of tests/conftest.py, opened, and other real data."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from pretrain.data.corpus import Corpus

SMALL_VOCABULARY = 600
GPT2_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gpt2"
WIKITEXT = GPT2_FOLDER.parent / "wikitext2-valid.txt"


def small_paths() -> list[Path]:
    """About 40 files, 0.5 MB: packages that every Python has."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for name in ("json", "email", "html") for path in sorted((library / name).glob("*.py"))]


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Corpus:
    """The opened small corpus."""
    return Corpus.open(small_folder)


@pytest.fixture(scope="session")
def gpt2_folder() -> Path:
    """GPT-2's vocab.json and merges.txt; skips where they are not there."""
    if not (GPT2_FOLDER / "merges.txt").is_file():
        pytest.skip("needs ../shared/data/gpt2")
    return GPT2_FOLDER
