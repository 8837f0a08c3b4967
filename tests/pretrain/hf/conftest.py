from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.exports import write_folder
from tests.helpers.networks import network
from tests.helpers.threads import one_thread as one_thread


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Native folder by config name (tests.helpers.networks.CONFIGS), written when first asked for."""
    root = tmp_path_factory.mktemp("native")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else write_folder(network(name), root / name)

    return folder
