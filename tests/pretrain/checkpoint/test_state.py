"""A state.json that was edited by hand is read, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.checkpoint.state import DataIdentity, Decided, Record, TrainingState, WorldRecord, read_state

STATE = TrainingState(
    step=3,
    seconds=1.5,
    recent={"losses": [1.0, 0.5]},
    pending=["validation"],
    released={"a": 2},
    records={"growth": Record({"start": 1, "thresholds": [None]}, needed=True)},
    run={"seed": 1},
    decided=Decided(True, "all", "torch", 4),
    data=DataIdentity("hash", [("c0ffee", "1")]),
    world=WorldRecord(ranks=2, stage=3, dtype="bf16", versions={"torch": "2.13"}),
)
WRITTEN = json.loads(STATE.to_json())


def read(folder: Path, text: str) -> TrainingState | str:
    (folder / "state.json").write_text(text, encoding="utf-8")
    try:
        return read_state(folder)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500 + len(str(folder))
        return str(error)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, STATE.to_json()) == STATE
    assert read(tmp_path, json.dumps({"step": 3})) == TrainingState(step=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": {"data": None}}, "run.data: None is not valid; give text"),
        ({"run": {"seed": "x"}}, "run.seed: 'x' is not valid; give a whole number"),
        ({"run": {"validation": {"data": 3}}}, "run.validation.data: 3 is not valid"),
        ({"recent": {"other": []}}, "recent"),
    ],
)
def test_what_is_read_of_settings_is_checked(tmp_path: Path, values: object, message: str) -> None:
    """A setting of another version is kept; one that is used has its type."""
    assert message in str(read(tmp_path, json.dumps(values)))
    kept = read(tmp_path, json.dumps({"run": {"of_another_version": 3}}))
    assert isinstance(kept, TrainingState) and kept.run == {"of_another_version": 3}


@pytest.mark.parametrize("text", ["5", "null", "[]", "{", "[" * 1000, ""])
def test_no_object(tmp_path: Path, text: str) -> None:
    assert str(read(tmp_path, text)).startswith("checkpoint: ")
