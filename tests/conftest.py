"""What every test needs: nothing leaves the machine, and workers end with their file. Shared: a corpus, a
SLURM."""

from __future__ import annotations

import ast
import os
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

# What takes seconds to import, to start or to draw: modules that a test file imports, and fixtures that it
# asks for. A file can also say so itself: pytestmark = pytest.mark.takes_time.
SLOW_MODULES = (
    "deepspeed",
    "matplotlib",
    "pretrain.plots",
    "pretrain.study",
    "pretrain.utils.plotting",
    "subprocess",
    "tests.helpers.distributed",
    "tests.helpers.fake_gpu",
    "tests.helpers.fuzzing",
    "tests.helpers.launch",
    "tests.helpers.slurm",
    "tests.helpers.training",
    "torch.distributed",
    "transformers",
)
SLOW_FIXTURES = {"cluster", "finished", "small", "small_folder"}
MARK = "takes_time"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--quick, which make quick gives."""
    parser.addoption(
        "--quick", action="store_true", help="only files without other processes and heavy libraries"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what --quick leaves out, before it is imported."""
    quick = config.getoption("--quick") and collection_path.suffix == ".py"
    return True if quick and takes_time(collection_path.read_text(encoding="utf-8")) else None


def takes_time(code: str) -> bool:
    """Whether a test file uses a slow module or fixture, or has the mark; comments and texts do not count."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif (isinstance(node, ast.arg) and node.arg in SLOW_FIXTURES) or (
            isinstance(node, ast.Attribute) and node.attr == MARK
        ):
            return True
    return any(f"{module}.".startswith(f"{slow}.") for module in modules for slow in SLOW_MODULES)


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
    from pretrain.prepare.assemble import Selection
    from pretrain.prepare.make import make_corpus
    from tests.helpers.small_corpus import SMALL_VOCABULARY, small_source

    out = tmp_path_factory.mktemp("data") / "small"
    return make_corpus(small_source(), out, SMALL_VOCABULARY, Selection(0.2))


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Corpus:
    """The opened small corpus."""
    from pretrain.data.corpus import Corpus

    return Corpus.open(small_folder)
