"""Numbers, durations and labelled lines."""

import pytest

from pretrain.utils.format import human_number, human_seconds, log_line

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
