"""A state.json that was edited by hand is read, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("text", ["5", "null", "[]", "{", "[" * 1000, ""])
def test_no_object(tmp_path: Path, text: str) -> None:
    assert str(read(tmp_path, text)).startswith("checkpoint: ")


OTHER_TYPES: dict[str, list[Any]] = {
    "step": ["3", None, -1, 1.5, True, 10**400],
    "seconds": ["x", float("nan")],
    "recent": [[], {"losses": 5}, {"losses": ["x"]}],
    "pending": [{}, [5], "validation"],
    "released": [{"a": "x"}, [1]],
    "records": [{"growth": 3}, {"growth": {"needed": "yes"}}],
    "from_seed": [1],
    "decided": [{"compile": 1}, {"fused": "some"}],
    "data": ["x", {"data": [["one"]]}],
    "world": [5, {"ranks": -1}],
    "nonsense": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in OTHER_TYPES for value in OTHER_TYPES[name]]
)
def test_other_types(tmp_path: Path, name: str, value: Any) -> None:
    found = read(tmp_path, json.dumps(WRITTEN | {name: value}))
    assert isinstance(found, str) and name in found


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
states = st.dictionaries(st.sampled_from([*WRITTEN, "other"]), anything, max_size=4).map(
    lambda some: WRITTEN | some
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(states)
def test_any_edit_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, values: Any) -> None:
    read(tmp_path_factory.getbasetemp(), json.dumps(values))
