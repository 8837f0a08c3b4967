"""A declared class is the whole command line: flags, types, ranges, help."""

from __future__ import annotations

from typing import Literal

import pytest

from model.declared import NonNegativeInt, PositiveInt, declared
from pretrain.config.options import parse_options
from tests.helpers.refusals import refused


@declared()
class Options:
    """Some of every kind."""

    model: str
    """a folder, 100 % of it,
    in two lines"""
    limit: PositiveInt | None = None
    """at most this many"""
    seed: NonNegativeInt = 7
    """same seed, same text"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    share: float = 0.5
    quick: bool = False
    """less"""


def parse(*arguments):
    return parse_options(Options, arguments, "python -m x", "Does something.", positional=["model"])


def test_text_is_converted_to_what_the_fields_hold():
    assert parse("5") == Options("5")
    assert parse("m", "--limit", "3", "--dtype=bfloat16", "--share", "1e-3", "--quick") == Options(
        "m", limit=3, dtype="bfloat16", share=1e-3, quick=True
    )


REFUSED = {
    "": "required: MODEL",
    "m --limt 3": "--limt: unknown flag; did you mean '--limit'?",
    "m n --limit 3": "n: not expected here",
    "m 4 16": "4 16: not expected here; write a list with commas, such as 4,16",
    "m --limit": "expected one argument",
    "m --limit 0": "limit: '0' is not valid; give a number above 0",
    "m --seed x": "seed: 'x' is not valid; give a whole number",
    "m --share nan": "share: 'nan' is not valid; give a finite number",
    "m --dtype int8": "dtype: 'int8' is not valid; give one of float32, bfloat16",
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.items())
def test_what_is_not_declared_is_one_line(arguments, words):
    with refused(words):
        parse(*arguments.split())


def test_a_surplus_argument_may_be_blank():
    for text in ("", " "):
        with refused(f"{text!r}: not expected here"):
            parse("m", text)


def test_help_is_the_docstrings(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Does something." in printed and "a folder, 100 % of it, in two lines" in printed
    assert "same seed, same text (default: 7)" in printed
