"""The code stays as docs/architecture.md describes it: the checks of tests/helpers/architecture.py find no
problem in this repository, and the planted ones in small trees made for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from docs.draw_architecture import (
    EXTENSIONS_PICTURE,
    LIST,
    PAGE,
    PICTURE,
    draw,
    extension_edges,
    package_edges,
)
from tests.helpers.architecture import (
    MOST_AT_THE_TOP,
    MOST_MODULES,
    PUBLIC_TITLE,
    Check,
    cycles,
    direction,
    extensions_apart,
    mentions,
    network_alone,
    picture,
    private_deepspeed,
    shadows,
    sizes,
    study_apart,
)

ROOT = Path(__file__).resolve().parent.parent

CHECKS: list[Check] = [
    direction,
    extensions_apart,
    cycles,
    network_alone,
    study_apart,
    private_deepspeed,
    sizes,
    shadows,
    picture,
    mentions,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_repository(check: Check) -> None:
    assert check(ROOT) == []


SMALL = {
    PAGE: "## The order of packages\n\n| package | |\n|---|---|\n| `model/` | |\n| `pretrain/config/` | |\n"
    "| `pretrain/engine/` | |\n| `pretrain/metrics/` | |\n| `pretrain/` | |\n"
    f"\n{PUBLIC_TITLE}\n\n| `pretrain.metrics.file` |\n",
    "model/heads.py": "",
    "pretrain/config/__init__.py": "",
    "pretrain/config/run_config.py": "from model.heads import heads\n",
    "pretrain/engine/build.py": "import deepspeed.runtime.engine\nfrom pretrain.config import run_config\n",
    "pretrain/metrics/file.py": "from pretrain.engine import build\n",
    LIST: "Listed('study')\nListed('extra')\nListed('more', files=('more.py',), builds_on={'extra': 'x'})\n",
    "pretrain/extra/thing.py": "",
    "pretrain/study/file.py": "from pretrain.metrics import file\n",
    "pretrain/more.py": "from pretrain.extra import thing\n",
    "pretrain/trainer.py": "import deepspeed\nfrom pretrain.metrics import file\ndeepspeed.initialize()\n",
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The small tree's pictures."""
    root = tmp_path_factory.mktemp("drawn")
    for name, text in SMALL.items():
        plant(root, name, text)
    draw(package_edges(root), root / PICTURE)
    draw(extension_edges(root), root / EXTENSIONS_PICTURE)
    return [(root / path).read_bytes() for path in (PICTURE, EXTENSIONS_PICTURE)]


@pytest.fixture
def small(tmp_path: Path, drawn: list[bytes]) -> Path:
    """A tree without a problem."""
    for name, text in SMALL.items():
        plant(tmp_path, name, text)
    (tmp_path / PICTURE).parent.mkdir()
    for path, image in zip((PICTURE, EXTENSIONS_PICTURE), drawn, strict=True):
        (tmp_path / path).write_bytes(image)
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_tree_without_a_problem(small: Path) -> None:
    assert [problem for check in CHECKS for problem in check(small)] == []


CONFIG, NEW, BUILD = "pretrain/config/new.py", "pretrain/metrics/new.py", "pretrain/engine/build.py"
PLANTED: dict[Check, list[tuple[str, str, str | None]]] = {
    # A file, its text, and what is said of it; None for nothing.
    direction: [
        (CONFIG, "import pretrain.engine.build", "pretrain/engine comes after"),
        (CONFIG, "from pretrain.engine import build", "new:1 imports pretrain.engine.build"),
        (CONFIG, "from ..engine import build", "new:1 imports pretrain.engine.build"),
        ("pretrain/config/__init__.py", "from ..engine import build", "pretrain.config:1 imports"),
        (CONFIG, "def late():\n    import pretrain.engine.build", "pretrain.config.new:2"),
        (CONFIG, "if TYPE_CHECKING:\n    import pretrain.engine.build", "pretrain.config.new:2"),
        (CONFIG, "from pretrain.trainer import Trainer", "pretrain comes after"),
        ("pretrain/config/inner/new.py", "import pretrain.engine.build", "pretrain.config.inner.new:1"),
        ("pretrain/unknown/new.py", "", "pretrain/unknown/ is not in the order"),
    ],
    cycles: [
        ("model/heads.py", "import pretrain.trainer", "model.heads imports pretrain.trainer imports"),
        ("pretrain/engine/new.py", "from pretrain.engine import new, other", None),
        ("model/heads.py", "def late():\n    import pretrain.trainer", None),
    ],
    extensions_apart: [
        (CONFIG, "import pretrain.extra.thing", "config.new:1 is core and imports pretrain.extra"),
        (CONFIG, "load('pretrain.extra.thing:Thing')", "names pretrain.extra.thing:Thing"),
        (CONFIG, "'run python -m pretrain.extra'", None),
        ("pretrain/extra/new.py", "import pretrain.config.run_config", None),
        ("pretrain/extra/new.py", "import pretrain.more", "imports pretrain.more, which"),
        ("pretrain/more.py", "import pretrain.extra.thing", None),
        ("pretrain/more.py", "", "more does not build on extra"),
    ],
    network_alone: [
        ("model/new.py", "import pretrain.config", "model.new:1 imports pretrain.config"),
        ("model/new.py", "def late():\n    from pretrain import trainer", "model.new:2 imports"),
    ],
    study_apart: [
        ("pretrain/study/new.py", "from pretrain.engine import build", "new:1 imports pretrain.engine.build"),
        ("pretrain/study/new.py", "from pretrain.study import file", None),
        ("pretrain/study/file.py", "", "studies do not use pretrain.metrics.file"),
    ],
    private_deepspeed: [
        (NEW, "from deepspeed.runtime.zero import stage3", "new.py:1 uses deepspeed.runtime.zero.stage3"),
        (NEW, "import deepspeed.runtime.engine", "new.py:1 uses deepspeed.runtime.engine"),
        (NEW, "def late():\n    from deepspeed.utils import groups", "new.py:2 uses deepspeed.utils.groups"),
        (NEW, "from deepspeed import runtime", "uses deepspeed.runtime"),
        (NEW, "import deepspeed\ndeepspeed.ops.__compatible_ops__['x'] = 0", "uses deepspeed.ops"),
        (NEW, "import deepspeed as ds\nds.comm.comm.cdb", "new.py:2 uses ds.comm.comm.cdb"),
        (NEW, "import deepspeed\ndeepspeed.initialize = None", "new.py:2 uses deepspeed.initialize"),
        (NEW, "patch('deepspeed.runtime.engine.step')", "new.py:1 uses 'deepspeed.runtime.engine.step'"),
        (NEW, "engine._copy_recovery_script = None", "uses engine._copy_recovery_script"),
        (NEW, "self.engine.param_names", "uses self.engine.param_names"),
        (NEW, "setattr(engine, 'checkpoint_engine', 1)", "uses engine.checkpoint_engine"),
        (NEW, "engine.optimizer.optimizer.state", "uses engine.optimizer.optimizer"),
        (NEW, "optimizer._hp_optimizer_states_linked", "uses optimizer._hp_optimizer_states_linked"),
        (NEW, "optimizer.fp32_partitioned_groups_flat", "uses optimizer.fp32_partitioned_groups_flat"),
        (NEW, "inner = self.engine.optimizer\ninner.bf16_groups", "new.py:2 uses inner.bf16_groups"),
        (NEW, "getattr(parameter, 'ds_shape', None)", "uses parameter.ds_shape"),
        (NEW, "module.is_invalid_grad_norm = None", "uses module.is_invalid_grad_norm"),
        ("model/new.py", "weight.ds_tensor", "model/new.py:1 uses weight.ds_tensor"),
        ("pretrain/engine/new.py", "from deepspeed.runtime import engine\nengine.param_names", None),
        (NEW, "from deepspeed.ops.adam import DeepSpeedCPUAdam\nengine.optimizer.param_groups", None),
        (NEW, "run.optimizer.betas", None),
    ],
    sizes: [("model/new.py", "\n" * 501, "model/new.py has 501 lines, more than 500")],
    shadows: [
        ("pretrain/logging.py", "", "pretrain/logging.py shadows the library logging"),
        ("pretrain/datasets.py", "", "pretrain/datasets.py shadows the library datasets"),
        ("pretrain/tokenizers/__init__.py", "", "pretrain/tokenizers shadows the library tokenizers"),
    ],
    picture: [
        ("pretrain/engine/build.py", "", "pretrain/engine -> pretrain/config"),
        (LIST, "Listed('study')\nListed('extra')", "extensions.png is out of date (more -> extra)"),
        ("pretrain/config/new.py", "from pretrain.config import run_config", None),
        ("pretrain/metrics/new.py", "from pretrain.config import run_config", None),  # by way of engine
    ],
    mentions: [
        ("README.md", "See `pretrain/lost.py`.", "README.md:1 names pretrain/lost.py"),
        ("docs/page.md", "\nmore in docs/lost.md", "docs/page.md:2 names docs/lost.md"),
        ("docs/page.md", "[more](lost.md#part)", "docs/page.md:1 names lost.md"),
        ("docs/page.md", "[file](../model/heads.py) [far](https://example.org/a.md#part)", None),
        ("docs/page.md", "# A `part`, so\n[here](#a-part-so) [again](../docs/page.md#a-part-so)", None),
        ("docs/page.md", "# Part\n[here](#parts)", "docs/page.md:2 names #parts"),
        ("docs/page.md", "# Part\n[there](../README.md#part)", "docs/page.md:2 names ../README.md#part"),
        ("Makefile", "\tpython -m pretrain.lost", "Makefile:1 names pretrain.lost"),
        ("slurm/job.sh", "python -m model.lost", "slurm/job.sh:1 names model.lost"),
        ("model/heads.py", "# as in pretrain.metrics.file.lost", "names pretrain.metrics.file.lost"),
        ("pretrain/__init__.py", "if True:\n    from pretrain.trainer import lost\n# pretrain.lost", None),
        ("README.md", "pretrain/trainer.py pretrain.metrics.file.build /pretrain/lost.py", None),
    ],
}


EACH = [(check, *case) for check, cases in PLANTED.items() for case in cases]


@pytest.mark.parametrize(("check", "name", "text", "problem"), EACH)
def test_a_planted_problem(small: Path, check: Check, name: str, text: str, problem: str | None) -> None:
    plant(small, name, text)
    found = check(small)
    if problem is None:
        assert found == []
    else:
        assert any(problem in line for line in found), found


MOST = [("pretrain", MOST_AT_THE_TOP), ("pretrain/engine", MOST_MODULES)]


@pytest.mark.parametrize(("folder", "most"), MOST)
def test_a_package_with_too_many_modules(small: Path, folder: str, most: int) -> None:
    existing = len([*(small / folder).glob("*.py")])
    for number in range(most - existing):
        plant(small, f"{folder}/part{number}.py", "")
    plant(small, f"{folder}/__init__.py", "")
    assert sizes(small) == []
    plant(small, f"{folder}/one_more.py", "")
    assert sizes(small) == [f"{folder}/ holds {most + 1} modules, more than {most}"]


def test_a_picture_that_says_nothing(small: Path) -> None:
    (small / PICTURE).write_bytes((ROOT / "docs/pictures/upper_qk-llama.png").read_bytes())
    assert len(picture(small)) == 1


def test_console_commands_exist():
    """Each is the main() of a module that python -m runs, too; but for the one that trains."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.pop("pretrain-train") == "pretrain.main:start"
    assert scripts.pop("head-schedules") == "pretrain.cli:main"
    for name, target in scripts.items():
        module, function = target.split(":")
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file() and function == "main", name
        plain = module.removesuffix(".command").removesuffix(".__main__")
        assert plain.replace(".", "-").replace("_", "-") == name
