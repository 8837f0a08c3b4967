"""Values that no run can be made of: one line that names the setting or its file, at once, whatever the
setting."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from tests.helpers.fuzzing import fixed

LONG = "1" * 400
NO_NUMBERS = ["!!int 'abc'", "2026-13-45", "[[1]]", "{a: 1}", ".nan", "1e999", LONG]
NO_NUMBERS += ["[" * 1000, "{a: " * 1000]


def settings(value, name=""):
    """Every setting of a run by its flag, with its default."""
    if not dataclasses.is_dataclass(value):
        yield name, value
        return
    for field in dataclasses.fields(value):
        if field.name != "recipe":  # which --config sets
            yield from settings(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)


SETTINGS = dict(settings(RunConfig()))
NUMBERS = [name for name, value in SETTINGS.items() if type(value) in (int, float)]
SIZES = ["vocab_size", "context_length", "d_model", "ffn_width", "norm_eps", "rope_base", "init_std"]


def refused(call, *arguments: str) -> str:
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        call(list(arguments))
    assert time.process_time() - began < 5
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700
    return line


def build(arguments: list[str]) -> None:
    parse_command_line(arguments).run.build_model_config()


def in_yaml(name: str, value: str) -> str:
    """The recipe that gives one setting."""
    *sections, last = name.split(".")
    return "".join(f"{section}: {{" for section in sections) + f"{last}: {value}" + "}" * len(sections)


def test_what_is_no_number(tmp_path):
    """As a flag, after an equals sign, in a recipe, in the model's sizes and in a rule."""
    recipe = tmp_path / "recipe.yaml"
    routes = {
        "flag": lambda name, value: [f"--{name}", value],
        "equals sign": lambda name, value: [f"--{name}={value}"],
        "recipe": lambda name, value: ["--config", str(recipe)],
        "size": lambda name, value: [f"--architecture.{name}", value],
        "rule": lambda name, value: ["--lr_rules", f"[{{name: slow, parameters: [q], {name}: {value}}}]"],
    }
    names = {"size": SIZES, "rule": ["scale", "hold", "ramp", "depth_decay"]}

    @given(st.sampled_from(sorted(routes)), st.sampled_from(NO_NUMBERS), st.data())
    def test(route: str, value: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names.get(route, NUMBERS)))
        recipe.write_text(in_yaml(name, value))
        line = refused(build, *routes[route](name, value))
        assert name in line or {"recipe": "recipe.yaml", "rule": "lr_rules"}.get(route, name) in line

    fixed(test, examples=25)


def test_any_text_at_any_setting():
    @given(st.sampled_from(sorted(SETTINGS)), st.sampled_from(NO_NUMBERS) | st.text(max_size=12))
    def test(name: str, value: str) -> None:
        try:
            build([f"--{name}={value}"])
        except UserError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000

    fixed(test, examples=30)
