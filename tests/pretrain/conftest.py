"""Real data that some checkouts have beside them, and what stands in for it elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gpt2 import write_gpt2
from tests.helpers.small_corpus import GPT2_FOLDER


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's vocab.json and merges.txt; without ../shared/data/gpt2 those that a few texts need."""
    if (GPT2_FOLDER / "merges.txt").is_file():
        return GPT2_FOLDER
    return write_gpt2(tmp_path_factory.mktemp("tokenizers") / "gpt2")
