"""wandb: which mode is taken, that failures stay harmless, and one real offline run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pretrain.metrics.tracking import WandbLogger


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stands for the module wandb; nobody is logged in."""
    module = MagicMock()
    module.login.return_value = False
    module.init.return_value.url = "https://example.org/run"
    module.init.return_value.step = 0
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return module


def started(fake: MagicMock, name: str) -> list[Any]:
    """That argument of each wandb.init."""
    return [call.kwargs.get(name) for call in fake.init.call_args_list]


def logged(fake: MagicMock) -> list[tuple[int, dict[str, Any]]]:
    return [(call.kwargs["step"], call.args[0]) for call in fake.init.return_value.log.call_args_list]


def record(folder: Path, mode: Any) -> list[str]:
    said: list[str] = []
    logger = WandbLogger(folder, mode=mode, config={"seed": 1}, report=said.append)
    logger.log(1, {"train_loss": 2.0})
    logger.log(2, {"train_loss": 1.0})
    logger.close(10)
    return said


MODES = [
    ("online", False, True, ["offline"], "wandb sync"),
    ("online", True, False, ["online", "offline"], "cannot go online (no route to host)"),
    ("online", True, True, ["online"], "https://example.org/run"),
    ("offline", True, True, ["offline"], "wandb sync"),
]


@pytest.mark.parametrize(("mode", "logged_in", "server_answers", "modes", "text"), MODES)
def test_modes(fake, tmp_path, mode, logged_in, server_answers, modes, text) -> None:
    fake.login.return_value = logged_in
    if not server_answers:
        fake.init.side_effect = [OSError("no route to host\nand a long story"), fake.init.return_value]
    said = record(tmp_path, mode)
    assert started(fake, "mode") == modes
    assert text in "\n".join(said)
    assert logged(fake) == [(1, {"train_loss": 2.0}), (2, {"train_loss": 1.0})]
    fake.init.return_value.finish.assert_called_once()
    if mode != "offline":
        fake.login.assert_called_once_with(prompt=False, verify=False)


def test_nothing_is_written_unless_asked_for(fake, tmp_path) -> None:
    fake.login.return_value = True
    assert not record(tmp_path, "auto")
    assert not started(fake, "mode") and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", ["disabled", "offline", "online"])
def test_the_environment_decides_auto(fake, tmp_path, monkeypatch, value) -> None:
    fake.login.return_value = True
    monkeypatch.setenv("WANDB_MODE", value)
    record(tmp_path, "auto")
    assert started(fake, "mode") == ([] if value == "disabled" else [value])


def test_a_resumed_run_keeps_its_id(fake: MagicMock, tmp_path: Path) -> None:
    record(tmp_path, "offline")
    record(tmp_path, "offline")
    assert started(fake, "id") == 2 * [(tmp_path / "wandb" / "run_id").read_text().strip()]
    assert started(fake, "resume") == ["allow", "allow"]


def test_curves_are_over_tokens(fake: MagicMock, tmp_path: Path) -> None:
    record(tmp_path, "offline")
    calls = fake.init.return_value.define_metric.call_args_list
    expected = [(("tokens",), {}), (("*",), {"step_metric": "tokens"})]
    assert [(call.args, call.kwargs) for call in calls] == expected


@pytest.mark.parametrize(("resumed_at", "newest_step"), [(0, 57), (58, 50), (58, 57)])
def test_figures_of_earlier_steps_are_not_dropped(
    fake: MagicMock, tmp_path: Path, resumed_at: int, newest_step: int
) -> None:
    """wandb drops rows behind its newest: what they hold goes into the next one, with its own tokens."""
    fake.init.return_value.step = resumed_at
    logger = WandbLogger(tmp_path, mode="offline", newest_step=newest_step, report=lambda line: None)
    logger.log(50, {"evaluation/piqa/acc": 0.5, "tokens": 500})
    for step in (57, 58, 59):
        logger.log(step, {"train_loss": 1.0, "tokens": 10 * step})
    logger.close(10)
    assert logged(fake) == [
        (58, {"evaluation/piqa/acc": 0.5, "tokens": 500}),
        (58, {"train_loss": 1.0, "tokens": 580}),
        (59, {"train_loss": 1.0, "tokens": 590}),
    ]


@pytest.mark.parametrize("given", [False, True])
def test_runs_are_filed_by_group_and_tags(
    fake: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    if given:  # wandb reads these itself
        monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
        monkeypatch.setenv("WANDB_TAGS", "a,b")
    labels: dict[str, Any] = {"group": "g" * 200, "tags": ["t" * 99]}
    WandbLogger(tmp_path, mode="offline", report=lambda line: None, **labels).close(10)
    assert started(fake, "group") == [None if given else "g" * 128]
    assert started(fake, "tags") == [None if given else ["t" * 64]]


def test_the_project_is_the_settings_or_the_environments(
    fake: MagicMock, tmp_path: Path, monkeypatch
) -> None:
    for given, project in ((None, None), ("theirs", None), ("theirs", "ours")):
        if given:
            monkeypatch.setenv("WANDB_PROJECT", given)
        WandbLogger(tmp_path, mode="offline", report=lambda line: None, project=project).close(10)
    assert started(fake, "project") == ["head-schedules", None, "ours"]


def test_all_sessions_of_a_run_can_be_sent(fake: MagicMock, tmp_path: Path) -> None:
    """Every session of an offline run has a folder of its own."""
    folder = tmp_path / "my runs" / "a"
    said = [*record(folder, "offline"), *record(folder, "offline")]
    for line in said:
        command = line.partition("to send it: ")[2]
        assert command == f"wandb sync '{folder}/wandb/'offline-run-*"


def test_failures_are_one_line_and_harmless(fake: MagicMock, tmp_path: Path) -> None:
    fake.init.side_effect = ValueError
    said = record(tmp_path, "offline")
    assert len(said) == 1 and said[0].startswith("wandb    stopped (")


def test_a_missing_package_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = record(tmp_path, "offline")
    assert len(said) == 1 and "metrics.jsonl has everything" in said[0]


def test_a_slow_start_blocks_neither_rows_nor_the_end(fake: MagicMock, tmp_path: Path) -> None:
    gate, said = threading.Event(), list[str]()
    fake.init.side_effect = lambda **arguments: gate.wait() and MagicMock()
    logger = WandbLogger(tmp_path, mode="offline", report=said.append)
    began = time.perf_counter()
    for step in range(1000):
        logger.log(step, {})
    logger.close(0.1)
    assert time.perf_counter() - began < 10  # the start is never let go
    assert "still busy" in said[0]
    gate.set()


@pytest.mark.slow
def test_real_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said = record(tmp_path, "offline")
    assert len(said) == 1 and "wandb sync" in said[0]
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    files = list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0
