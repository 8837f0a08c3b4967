"""What every test needs: nothing leaves the machine, and workers end with the session."""

from __future__ import annotations

import os

import pytest

# Before any library reads them. A developer who is logged in to wandb must not find test runs in their
# account, and a test that needs a download would fail on a machine without a network.
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the workers of multi-process tests while the session still reports."""
    from tests import distributed

    distributed.shutdown()
