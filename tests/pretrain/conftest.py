"""Real data that some checkouts have beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.small_corpus import GPT2_FOLDER


@pytest.fixture(scope="session")
def gpt2_folder() -> Path:
    """GPT-2's vocab.json and merges.txt; skips where they are not there."""
    if not (GPT2_FOLDER / "merges.txt").is_file():
        pytest.skip("needs ../shared/data/gpt2")
    return GPT2_FOLDER
