"""A finished run, to look at; no test changes it."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session


@pytest.fixture(scope="session")
def finished(small_folder, tmp_path_factory):
    """An uninterrupted run of 12 steps on one rank: its RunConfig."""
    run = nano_run(small_folder, tmp_path_factory.mktemp("runs"))
    assert run_distributed(session, 1, run, timeout=120)[0] == ([], None)
    return run
