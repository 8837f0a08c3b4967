"""Declared data: checked however it is made, and refused in one line that names the field, the value and what
is valid."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.declared import PositiveInt, UnitInterval, declared, from_dict, to_dict
from model.errors import UserError


@declared("growth")
class Inner:
    start: PositiveInt = 1
    kind: Literal["one", "two"] = "one"
    betas: tuple[UnitInterval, UnitInterval] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.start == 7:
            raise UserError("growth.start: 7 is odd; give 8")


@declared()
class Outer:
    steps: PositiveInt = 3
    growth: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Inner(start=0), "growth.start: 0 is not valid; give a number above 0"),
        (
            lambda: dataclasses.replace(Inner(), start=0),
            "growth.start: 0 is not valid; give a number above 0",
        ),
        (lambda: Inner(start=True), "growth.start: True is not valid; give a whole number"),
        (lambda: Inner(start=7), "growth.start: 7 is odd; give 8"),
        (lambda: Outer(step=1), "step: unknown; did you mean 'steps'?"),  # type: ignore[call-arg]
        (lambda: Outer(steps=10**30), "steps: 1000000000000000000000000000000 is not valid; give at most"),
        (lambda: from_dict(Outer, {"growth": {"start": 0}}, "file"), "file: growth.start: 0 is not valid"),
        (lambda: from_dict(Outer, {"growth": {"start": 7}}, "file"), "file: growth.start: 7 is odd; give 8"),
        (lambda: from_dict(Outer, {"growth": 3}, "file"), "file: growth: 3 is not valid; give a mapping"),
        (
            lambda: from_dict(Outer, {"growth": {"kind": "three"}}),
            "growth.kind: 'three' is not valid; give one",
        ),
        (lambda: from_dict(Outer, [], "file"), "file: value: [] is not valid"),
    ],
)
def test_a_mistake_is_one_line(make: Any, line: str) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["steps", "growth", "other"]), PLAIN) | PLAIN)
def test_anything_is_read_or_refused_in_one_line(values: Any) -> None:
    try:
        made = from_dict(Outer, values, "file")
    except UserError as error:
        assert str(error).startswith("file") and "\n" not in str(error)
    else:
        assert from_dict(Outer, to_dict(made)) == made
