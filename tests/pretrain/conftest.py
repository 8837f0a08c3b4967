"""One small corpus of real text, prepared once for all tests below this folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from pretrain.data.corpus import TextFiles
from pretrain.data.prepare import prepare
from pretrain.data.sequences import Corpus

SMALL_VOCABULARY = 600
GPT2_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gpt2"
WIKITEXT = GPT2_FOLDER.parent / "wikitext2-valid.txt"


def small_paths() -> list[Path]:
    """About 40 files, 0.5 MB: packages that every Python has."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for name in ("json", "email", "html") for path in sorted((library / name).glob("*.py"))]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus folder of :func:`small_paths` with a SentencePiece tokenizer of SMALL_VOCABULARY entries."""
    out = tmp_path_factory.mktemp("data") / "small"
    return prepare(TextFiles(small_paths()), out, train_tokenizer=SMALL_VOCABULARY, validation_fraction=0.2)


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
