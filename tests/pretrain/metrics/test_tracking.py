"""wandb: which mode is taken, that failures stay harmless, and one real offline run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pretrain.metrics.tracking import WandbLogger


class FakeRun:
    url = "https://example.org/run"

    def __init__(self, dir: str) -> None:
        self.dir = dir + "/wandb/run/files"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.step = 0
        self.axes: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """The part of wandb that the logger uses."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged_in = False
        self.server_answers = True
        self.started: list[dict[str, Any]] = []
        self.run: FakeRun | None = None
        self.resumed_at = 0
        self.gate = threading.Event()
        self.gate.set()

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def setup(self, settings: Any) -> None: ...

    def teardown(self) -> None: ...

    def login(self, prompt: bool, verify: bool) -> bool:
        assert prompt is False and verify is False
        return self.logged_in

    def init(self, **arguments: Any) -> FakeRun:
        self.gate.wait()
        self.started.append(arguments)
        if arguments["mode"] == "online" and not self.server_answers:
            raise OSError("no route to host\nand a long story")
        self.run = FakeRun(arguments["dir"])
        self.run.step = self.resumed_at
        return self.run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_DISABLED", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return module


def record(folder: Path, mode: Any) -> list[str]:
    said: list[str] = []
    logger = WandbLogger(folder, mode=mode, config={"seed": 1}, report=said.append)
    logger.log(1, {"train_loss": 2.0})
    logger.log(2, {"train_loss": 1.0})
    logger.close(10)
    return said


@pytest.mark.parametrize(
    ("mode", "logged_in", "server_answers", "modes", "text"),
    [
        ("auto", True, True, ["online"], "https://example.org/run"),
        ("auto", False, True, ["offline"], "wandb sync"),
        ("auto", True, False, ["online", "offline"], "cannot go online (no route to host)"),
        ("online", False, True, ["offline"], "not logged in"),
        ("online", True, True, ["online"], "https://example.org/run"),
        ("offline", True, True, ["offline"], "wandb sync"),
    ],
)
def test_modes(fake, tmp_path, mode, logged_in, server_answers, modes, text) -> None:
    fake.logged_in, fake.server_answers = logged_in, server_answers
    said = record(tmp_path, mode)
    assert [start["mode"] for start in fake.started] == modes
    assert text in "\n".join(said)
    assert fake.run is not None and fake.run.finished
    assert fake.run.rows == [(1, {"train_loss": 2.0}), (2, {"train_loss": 1.0})]


@pytest.mark.parametrize(
    ("value", "modes"), [("disabled", []), ("offline", ["offline"]), ("online", ["online"])]
)
def test_the_environment_decides_auto(
    fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, modes: list[str]
) -> None:
    fake.logged_in = True
    monkeypatch.setenv("WANDB_MODE", value)
    record(tmp_path, "auto")
    assert [start["mode"] for start in fake.started] == modes


def test_disabled_touches_nothing(fake: FakeWandb, tmp_path: Path) -> None:
    assert record(tmp_path, "disabled") == []
    assert fake.started == [] and list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_its_id(fake: FakeWandb, tmp_path: Path) -> None:
    record(tmp_path, "offline")
    record(tmp_path, "offline")
    ids = [start["id"] for start in fake.started]
    assert ids[0] == ids[1] == (tmp_path / "wandb" / "run_id").read_text().strip()
    assert fake.started[0]["resume"] == "allow"


def test_curves_are_over_tokens(fake: FakeWandb, tmp_path: Path) -> None:
    record(tmp_path, "offline")
    assert fake.run is not None and fake.run.axes == {"tokens": None, "*": "tokens"}


@pytest.mark.parametrize(("resumed_at", "newest_step"), [(0, 57), (58, 50), (58, 57)])
def test_figures_of_earlier_steps_are_not_dropped(
    fake: FakeWandb, tmp_path: Path, resumed_at: int, newest_step: int
) -> None:
    """wandb drops rows behind its newest: what they hold goes into the next one, with its own tokens."""
    fake.resumed_at = resumed_at
    logger = WandbLogger(tmp_path, mode="offline", newest_step=newest_step, report=lambda line: None)
    logger.log(50, {"evaluation/piqa/acc": 0.5, "tokens": 500})
    for step in (57, 58, 59):
        logger.log(step, {"train_loss": 1.0, "tokens": 10 * step})
    logger.close(10)
    assert fake.run is not None and fake.run.rows == [
        (58, {"evaluation/piqa/acc": 0.5, "tokens": 500}),
        (58, {"train_loss": 1.0, "tokens": 580}),
        (59, {"train_loss": 1.0, "tokens": 590}),
    ]


@pytest.mark.parametrize("given", [False, True])
def test_runs_are_filed_by_group_and_tags(
    fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    if given:  # wandb reads these itself
        monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
        monkeypatch.setenv("WANDB_TAGS", "a,b")
    WandbLogger(tmp_path, mode="offline", group="g" * 200, tags=["t" * 99], report=lambda line: None).close(
        10
    )
    started = fake.started[0]
    if given:
        assert "group" not in started and "tags" not in started
    else:
        assert started["group"] == "g" * 128 and started["tags"] == ["t" * 64]


def test_all_sessions_of_a_run_can_be_sent(fake: FakeWandb, tmp_path: Path) -> None:
    """Every session of an offline run has a folder of its own."""
    folder = tmp_path / "my runs" / "a"
    said = [*record(folder, "offline"), *record(folder, "offline")]
    for line in said:
        command = line.partition("to send it: ")[2]
        assert command == f"wandb sync '{folder}/wandb/'offline-run-*"


def test_failures_are_one_line_and_harmless(fake: FakeWandb, tmp_path: Path) -> None:
    fake.init = None  # type: ignore[method-assign, assignment]
    said = record(tmp_path, "offline")
    assert len(said) == 1 and said[0].startswith("wandb    stopped (")


def test_a_missing_package_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = record(tmp_path, "offline")
    assert len(said) == 1 and "metrics.jsonl has everything" in said[0]


def test_a_slow_start_blocks_neither_rows_nor_the_end(fake: FakeWandb, tmp_path: Path) -> None:
    fake.gate.clear()
    said: list[str] = []
    logger = WandbLogger(tmp_path, mode="offline", report=said.append)
    began = time.perf_counter()
    for step in range(1000):
        logger.log(step, {})
    logger.close(0.1)
    assert time.perf_counter() - began < 10  # the start is never let go
    assert "still busy" in said[0]
    fake.gate.set()


def test_real_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said = record(tmp_path, "offline")
    assert len(said) == 1 and "wandb sync" in said[0]
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    files = list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0
