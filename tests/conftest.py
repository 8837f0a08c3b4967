"""What every test needs: nothing leaves the machine, and workers end with their file. Shared: a corpus, a
SLURM."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pretrain.data.corpus import Corpus
    from tests.helpers.slurm import Cluster

# Before any library reads them. A developer who is logged in to wandb must not find test runs in their
# account, and a test that needs a download would fail on a machine without a network.
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On a machine with GPUs, too, tests are of the CPU, with as many ranks as they like. Those of GPUs need
# DS_ACCELERATOR=cuda (tests/helpers/gpus.py).
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Test processes side by side (make test) share the cores; more threads than cores would only fight.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the text of a test file: what takes seconds to import, to start or to draw.
TAKES_TIME = re.compile(
    r"deepspeed|distributed|launch|subprocess|small_folder|fuzzing|transformers"
    r"|pretrain\.study|matplotlib|plot|draw"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--quick, which make quick gives."""
    parser.addoption(
        "--quick", action="store_true", help="only files without other processes and heavy libraries"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what --quick leaves out, before it is imported."""
    quick = config.getoption("--quick") and collection_path.suffix == ".py"
    return True if quick and TAKES_TIME.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.fixture(autouse=True, scope="module")
def workers_of_one_file() -> Iterator[None]:
    """End the workers of multi-process tests with their file: the process groups made in them keep threads
    busy."""
    yield
    distributed = sys.modules.get("tests.helpers.distributed")
    if distributed is not None:
        distributed.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real SLURM of two nodes."""
    from tests.helpers import slurm

    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus folder of ``small_paths`` with a SentencePiece tokenizer of SMALL_VOCABULARY entries."""
    from pretrain.data.making.assemble import Selection
    from pretrain.data.making.make import make_corpus
    from tests.helpers.small_corpus import SMALL_VOCABULARY, small_source

    out = tmp_path_factory.mktemp("data") / "small"
    return make_corpus(small_source(), out, SMALL_VOCABULARY, Selection(0.2))


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Corpus:
    """The opened small corpus."""
    from pretrain.data.corpus import Corpus

    return Corpus.open(small_folder)
