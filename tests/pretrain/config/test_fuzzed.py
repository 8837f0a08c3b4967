"""Models and learning-rate rules as chance writes them: an answer or one line, within five seconds."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import event, given
from hypothesis import strategies as st

from model.config import ModelConfig
from model.errors import UserError
from model.presets import preset
from pretrain.config.command_line import parse_command_line
from pretrain.config.lr_rules import LAYER_WORDS, NAMED_RULES, PARTS, LearningRateRule
from pretrain.config.run_config import RunConfig
from pretrain.engine.memory.micro_batch import plan_batch
from pretrain.optim.groups import GroupRates, run_groups
from tests.helpers.fuzzing import fixed, seeded

# Values that people and programs write by mistake, and some that are right.
ODD: list[Any] = yaml.safe_load("""
- [null, true, false, 0, 1, 2, 3, 12, 48, -1, 1000000, 2147483647, 2147483648, 1000000007, 0.5, 0.25]
- [1.0, 2.0, -0.5, 1.0e-5, 1.0e-320, 1.0e+30, 1.0e+300, .nan, .inf, "", auto, all, q, rope, mlp, none]
- ["3x2,6x2", "3x100000", "0x5", "6-11", "11-6", "0-999999999", "*", "[", "a\\nb", "\\0", [], [1], [[]]]
- [[3, 6], [3, 6, 12, 12], [null, 5], [0.5], [q, k], {}, {a: {}}, {heads: 3}]
""")
ODD = [*(value for line in ODD for value in line), 10**20, 10**400, "1x1" * 50]
ANYTHING = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NOISE = st.text(alphabet="[]{}:,-&*!|>?#'\" \n0123456789aeE.+ntqx~<%@", max_size=80)


def names(known: list[str]) -> st.SearchStrategy[str]:
    """A known name, one with a letter missing, or any text."""
    return st.one_of(
        st.sampled_from(known),
        st.sampled_from(known).map(lambda name: name[:-2] + name[-1:]),
        st.text(max_size=8),
    )


@st.composite
def written(draw: st.DrawFn, value: Any, dump: Callable[[Any], str]) -> str:
    """The text of *value*; of every tenth, text that somebody has typed into."""
    text = dump(value)
    if draw(st.integers(0, 9)) == 0:
        place, what = draw(st.integers(0, len(text))), draw(NOISE)
        text = text[:place] + what + text[place + len(what) :]
    return text


# ---------------------------------------------------------------------- models

MODELS = ["prism-nano", "gpt2-nano", "prism-124m", "headprog-ascending-45", "llama-mini"]
FIELDS = [field.name for field in fields(ModelConfig)]


@st.composite
def model_files(draw: st.DrawFn) -> str:
    """The JSON of a preset with up to five edits: any value at a field, a name misspelt, a field dropped."""
    values = preset(draw(st.sampled_from(MODELS))).to_json()
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 5]))):
        if draw(st.integers(0, 9)) < 8:
            values[draw(names(FIELDS))] = draw(ANYTHING)
        else:
            values.pop(draw(st.sampled_from(FIELDS)), None)
    whole = values if draw(st.integers(0, 19)) else draw(ANYTHING)
    return draw(written(whole, lambda value: json.dumps(value, skipkeys=True)))


@cache
def default_run() -> RunConfig:
    return parse_command_line([]).run


@given(model_files())
def model_is_built_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            model = replace(default_run(), model=str(path), architecture={}).build_model_config()
        except UserError as error:
            assert one_line(error)
            event("refused")
            return
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert model.num_parameters() > 0 and model.flops_per_token() > 0
    assert model.padded_vocab_size(3) >= model.vocab_size
    try:
        plan_batch(64 * model.context_length, None, model, 2, 1 << 33, "cpu")
    except UserError as error:
        assert one_line(error)
    event("taken")


def one_line(error: UserError) -> bool:
    return "\n" not in str(error) and len(str(error)) < 1000


def test_models():
    fixed(model_is_built_or_refused, examples=100)


@pytest.mark.slow
def test_more_models():
    seeded(model_is_built_or_refused, examples=1000)


# ---------------------------------------------------------------------- learning-rate rules

RULE_FIELDS = [field.name for field in fields(LearningRateRule)]
LENGTHS = st.sampled_from([0, 0.01, 0.04, 0.12, 0.5, 1, 2, 30, 100, 10**6, 0.999999, 2.5])
RULES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(["slow", "fast", "a.b-c_d", "base", "é", ""]),
    "parameters": st.lists(
        st.sampled_from([*PARTS, "layers.*.attention.q.weight", "*norm*", "*.bias", "*"]),
        min_size=1,
        max_size=3,
    ),
    "layers": st.sampled_from([*LAYER_WORDS, 0, 3, "0-3", "2-2", [0, 2], ["1-2", 3], "0,2-3", "7", "3-0"]),
    "scale": st.sampled_from([0.25, 1, 2, 100.0, 1e-9, 0]),
    "hold": LENGTHS,
    "ramp": LENGTHS,
    "release": st.sampled_from(["hold", "maturity"]),
    "latest": LENGTHS,
    "depth_decay": st.sampled_from([0.9, 1, 2.0, 1e10, 1e-10]),
    "freeze": st.booleans(),
    "decay_with_lr": st.booleans(),
    "biases": st.booleans(),
}


@st.composite
def rules(draw: st.DrawFn) -> Any:
    """A rule by name, or one with name, parameters and scale, other fields, and up to two edits of any
    kind."""
    if draw(st.integers(0, 5)) == 0:
        return draw(names(list(NAMED_RULES)))
    chosen = ["name", "parameters", *(["scale"] if draw(st.integers(0, 5)) else [])]
    chosen += draw(st.lists(st.sampled_from(RULE_FIELDS[2:]), max_size=4))
    rule = {name: copy.deepcopy(draw(RULES[name])) for name in chosen}
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        rule[draw(names(RULE_FIELDS))] = draw(ANYTHING)
    return rule


def in_yaml(value: Any) -> str:
    try:
        return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True)
    except (yaml.YAMLError, ValueError):  # control characters, overlong numbers
        return repr(value) if not isinstance(value, int) else hex(value)


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    """What is typed after --lr_rules: JSON or YAML of some rules, of anything, or noise."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(NOISE)
    value = draw(ANYTHING) if kind == 1 else draw(st.lists(rules(), min_size=1, max_size=3))
    return draw(written(value, json.dumps if kind % 2 else in_yaml))


@given(rule_texts())
def rules_are_followed_or_refused(text: str) -> None:
    try:
        run = parse_command_line(["--model", "prism-nano", "--steps", "100", "--lr_rules", text]).run
        rates = GroupRates(run_groups(run, run.build_model_config()), run)
        found = [rates.at(name, step) for name in rates.groups for step in (0, 1, 50, 99)]
    except UserError as error:
        assert one_line(error), error
        event("refused")
        return
    assert all(0 <= rate < float("inf") and 0 <= decay < float("inf") for rate, decay in found), found
    event("taken")


def test_rules():
    fixed(rules_are_followed_or_refused, examples=50)


@pytest.mark.slow
def test_more_rules():
    seeded(rules_are_followed_or_refused, examples=500)
