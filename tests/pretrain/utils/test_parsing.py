"""Whatever a file or a number holds: an answer or one line, within seconds."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError, quote
from pretrain.utils import parsing
from pretrain.utils.parsing import MOST_LEVELS, parse_fraction, parse_json, parse_yaml, read_json, read_yaml

JSON_NUMBERS = ["1" * 400, "1e999", "-1e999", "NaN", "Infinity"]
YAML_NUMBERS = ["1" * 400, ".inf", "-.inf", ".nan", "1.0e+999"]
NUMBERS = [(parse_json, number) for number in JSON_NUMBERS] + [
    (parse_yaml, number) for number in YAML_NUMBERS
]


@pytest.mark.parametrize(("parse", "number"), NUMBERS)
def test_numbers_nobody_can_use(parse, number):
    with pytest.raises(UserError, match=r"^recipe.*(sizes\.d_model|digits)") as caught:
        parse(f'{{"sizes": [{{"d_model": {number}}}]}}', "recipe")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["[" * 1000, '{"a":' * 1000, "[" * 1000 + "]" * 1000])
@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_nested_a_thousand_deep(parse, text):
    began = time.perf_counter()
    with pytest.raises(UserError, match=r"nested|not valid"):
        parse(text, "x")
    assert time.perf_counter() - began < 5


def test_as_deep_as_a_configuration_may_be():
    depth = MOST_LEVELS - 1
    assert parse_json("[" * depth + "]" * depth, "x") == parse_yaml("[" * depth + "]" * depth, "x")


WRONG_TAGS = ["!!int 'abc'", "!!float 'x'", "!!bool 'z'", "!!timestamp 'abc'", "!!binary a"]
SENSELESS = [*WRONG_TAGS, "!!python/object:os.system {}", "&a [*a]", "? [a]\n: b", "\x01"]


@pytest.mark.parametrize("text", SENSELESS)
def test_yaml_that_makes_no_sense(text):
    for written in (text, f"steps: {text}"):
        try:
            parse_yaml(written, "recipe")
        except UserError as error:
            assert str(error).startswith("recipe") and "\n" not in str(error)
        else:  # "steps: ? {a: b}" is text
            assert text.startswith("?")


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "x: {a: 1, a: 1}", "- {1: a, 1: b}"])
def test_yaml_that_gives_a_key_twice(text):
    with pytest.raises(UserError, match=r"^config: r\.yaml .* twice"):
        parse_yaml(text, "config: r.yaml")


def test_yaml_is_read_as_version_1_2():
    assert parse_yaml("[3e-4, 1E+3, -2.e1, 2026-11-24, 3x2]", "x") == [3e-4, 1e3, -20.0, "2026-11-24", "3x2"]


def test_yaml_that_merges_a_mapping():
    text = "base: &base {a: 1, b: 2}\nown: {<<: *base, a: 3}"
    assert parse_yaml(text, "config: r.yaml")["own"] == {"a": 3, "b": 2}


def test_aliases_that_double_at_every_level():
    text = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(UserError, match="more than 1,000,000 values"):
        parse_yaml(text, "recipe")


def test_files(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(UserError, match=r"model: cannot read .*No such file"):
        read_json(path, "model")
    path.write_bytes(b"\xff\xfe")
    for read in (read_json, read_yaml):
        with pytest.raises(UserError, match=r"model: .* is not UTF-8"):
            read(path, "model")
    path.write_text("[5]")
    assert read_json(path, "model") == read_yaml(path, "model") == [5]
    with pytest.raises(UserError, match=r"model: .* holds \[5\]; it must hold a JSON object"):
        parsing.read_json_object(path, "model")


NO_FRACTIONS = ("1e-99999999", "1e-3", "1e99999999", "1/0", "9" * 400, "x", "nan", "")
FRACTIONS = {"0.3": Fraction(3, 10), " 1/3 ": Fraction(1, 3), "2": Fraction(2)}


def test_fractions():
    for text, value in {**FRACTIONS, **dict.fromkeys(NO_FRACTIONS)}.items():
        assert parse_fraction(text) == value


@settings(derandomize=True, max_examples=200)
@given(st.text(alphabet="[]{}:,-&*!|>?#'\" \n0123456789aeE.+ntx", max_size=60))
def test_any_text_is_read_or_refused(text):
    for parse in (parse_json, parse_yaml):
        try:
            parse(text, "x")
        except UserError as error:
            assert "\n" not in str(error)


def test_values_that_are_fine():
    parsing.check_values({"a": [1, 2.5, True, None, "1e999", 2**63 - 1], "b": {"c": -(2**63 - 1)}}, "x")


def test_shown_is_short():
    assert quote(5) == "5" and quote("a") == "'a'" and quote("a", plain=True) == "a"
    assert len(quote("x" * 10_000)) <= 80 and "…" in quote("x" * 10_000)
    assert "too long" in quote(10**5000)
    assert quote("a\n\x1b[31mb é", plain=True) == "a\\n\\x1b[31mb é"
