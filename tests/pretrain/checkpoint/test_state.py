"""A state.json that was edited by hand is read, or refused in one line."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.checkpoint.state import TrainingState, read_state

WRITTEN = asdict(
    TrainingState(
        step=3, seconds=1.5, recent={"losses": [1.0, float("nan")]}, pending=["validation"], released={"a": 2}
    )
)


def read(folder, text: str) -> TrainingState | str:
    (folder / "state.json").write_text(text, encoding="utf-8")
    try:
        return read_state(folder)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500 + len(str(folder))
        return str(error)


def test_what_is_written_is_read(tmp_path):
    assert isinstance(read(tmp_path, json.dumps(WRITTEN)), TrainingState)
    assert isinstance(read(tmp_path, json.dumps({"step": 3})), TrainingState), (
        "older versions had fewer fields"
    )
    assert read(tmp_path, json.dumps(WRITTEN | {"seconds": 2})).seconds == 2


@pytest.mark.parametrize("text", ["5", "null", "[]", "{", "[" * 1000, '{"step": 1' + "0" * 4400 + "}", ""])
def test_no_object(tmp_path, text):
    assert read(tmp_path, text).startswith("checkpoint: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "3"), ("step", None), ("step", -1), ("step", 1.5), ("step", True), ("step", 10**400), ("seconds", "x"),
     ("seconds", float("nan")), ("recent", []), ("recent", {"losses": 5}), ("recent", {"losses": ["x"]}),
     ("recent", {"others": [1.0]}),
     ("pending", {}), ("pending", [5]), ("pending", "validation"), ("owed", []),
     ("released", {"a": "x"}), ("released", [1]),
     ("from_seed", 1), ("imported", 1), ("run", None), ("model", []), ("data", "x"), ("world", 5), ("nonsense", 1)],
)  # fmt: skip
def test_other_types(tmp_path, name, value):
    found = read(tmp_path, json.dumps(WRITTEN | {name: value}))
    assert isinstance(found, str) and name in found


def test_a_field_by_its_older_name(tmp_path):
    older = {name: value for name, value in WRITTEN.items() if name != "pending"} | {"owed": ["validation"]}
    assert read(tmp_path, json.dumps(older)).pending == ["validation"]


@pytest.mark.parametrize("from_seed", [True, False])
def test_an_older_state_that_is_not_from_the_seed_counts_as_imported(tmp_path, from_seed):
    older = {name: value for name, value in WRITTEN.items() if name != "imported"} | {"from_seed": from_seed}
    assert read(tmp_path, json.dumps(older)).imported is not from_seed


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
def test_any_edit_is_read_or_refused(tmp_path_factory, values):
    read(tmp_path_factory.getbasetemp(), json.dumps(values))
