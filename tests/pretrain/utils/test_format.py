"""Numbers, durations and labelled lines."""

import textwrap

import pytest

from pretrain.utils import format
from pretrain.utils.format import human_number, human_seconds, log_line, wrap_text

NUMBERS = {0: "0", 987: "987", 4120: "4.12k", 12345: "12.3k", 999_950: "1.00M", 2.5e9: "2.50B", 3e12: "3.00T"}


@pytest.mark.parametrize(("value", "text"), NUMBERS.items())
def test_human_number(value: float, text: str) -> None:
    assert human_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (42, "42s"), (59.9, "1m00s"), (200, "3m20s"), (7500, "2h05m"), (273_600, "3d04h")],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_numbers_that_are_none() -> None:
    assert human_number(float("nan")) == "nan"
    assert human_seconds(float("inf")) == "inf"


def test_labelled_lines_stand_in_one_column() -> None:
    assert log_line("saved", "here") == "saved    here"
    assert log_line("finished", 3) == "finished 3"
    assert log_line("next", "one\ntwo") == "next     one\n         two"


TEXT = "4 layers, heads 2,4,8x2 ▂▄██, " * 9 + "runs/" + "a" * 90 + " and more"


@pytest.mark.parametrize("columns", [20, 71, 80, 400])
def test_lines_are_broken_between_words(columns: int) -> None:
    expected = textwrap.wrap(TEXT, columns, break_long_words=False, break_on_hyphens=False)
    assert wrap_text(TEXT, columns).split("\n") == expected
    assert wrap_text(f"{TEXT}\n{TEXT}", columns).split("\n") == expected * 2


def test_a_terminal_gets_lines_of_its_width_and_a_log_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_line("data", TEXT) == f"data     {TEXT}"
    monkeypatch.setattr(format, "terminal_columns", lambda stream: 80)
    first, *others = log_line("data", "one two " * 20).split("\n")
    assert first == ("data     " + "one two " * 9)[:-1] and len(first) == 80
    assert others == ["         " + ("one two " * 9)[:-1], "         one two one two "]
    monkeypatch.setattr(format, "terminal_columns", lambda stream: 25)  # too narrow for a column of text
    assert log_line("data", TEXT) == f"data     {TEXT}"
