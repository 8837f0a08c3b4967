"""Numbers and files that no run can be made of: one line that names the field, exit code 2, at once."""

import time

import pytest

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.data.blend import parse_blend
from pretrain.plan.command import read_arguments

LONG, LONGER = "1" * 400, "9" * 4400
NUMBERS = [LONG, LONGER, "1e999", ".inf", ".nan", "NaN", "0x" + "f" * 400]
FIELDS = ["steps", "optimizer.learning_rate", "interruption.minutes", "seed"]


def refused(call, *arguments: str) -> str:
    began = time.perf_counter()
    with pytest.raises(UserError) as caught:
        call(list(arguments))
    assert time.perf_counter() - began < 5
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700
    return line


def build(arguments: list[str]) -> None:
    parse_command_line(arguments).run.build_model_config()


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: f"{text:.6}-{len(text)}")
@pytest.mark.parametrize("field", FIELDS)
def test_numbers_in_flags(field, number):
    assert field in refused(build, f"--{field}", number)


def test_numbers_after_an_equals_sign():
    assert "skip_spikes" in refused(build, f"--skip_spikes={LONG}")


@pytest.mark.parametrize("number", [LONG, LONGER, ".inf", ".nan"], ids=lambda text: f"{text:.6}-{len(text)}")
@pytest.mark.parametrize("field", ["steps", "skip_spikes"])
def test_numbers_in_recipes(field, number, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{field}: {number}")
    line = refused(build, "--config", str(recipe))
    assert "recipe.yaml" in line and (field in line or "digits" in line)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: f"{text:.6}-{len(text)}")
@pytest.mark.parametrize("field", ["scale: {}", "scale: 0.5, hold: {}", "scale: 0.5, layers: {}",
                                   'scale: 0.5, layers: "{}"', 'scale: 0.5, layers: "0-{}"'])  # fmt: skip
def test_numbers_in_rules(field, number):
    text = f"[{{name: slow, parameters: [q], {field.format(number)}}}]"
    assert "lr_rules" in refused(build, "--lr_rules", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", LONG], "heads: "),
        (["--heads", f"3x{LONGER}"], "heads: "),
        (["--heads", "3x100000"], "more than 10,000 layers"),
        (["--architecture", '{heads: "3x99999,3x2"}'], "more than 10,000 layers"),
        (["--architecture.d_model", "1000000007"], "heads: layer 0 has 2 heads, which do not divide d_model"),
        (["--architecture.d_model", "1e12"], "d_model"),
        (["--architecture.d_model", "1000000000000"], "d_model: 1000000000000 is not valid.*at most 2,147,483,647"),
        (["--architecture", "{kv_heads: [3000000000,3,3,3]}"], "kv_heads"),
        (["--architecture.ffn_width", LONG], "ffn_width"),
        (["--architecture.norm_eps", LONG], "norm_eps"),
        (["--global_batch_tokens", "1000000000000000"], "global_batch_tokens: .*give at most 1,000,000,000,000"),
    ],
)  # fmt: skip
def test_sizes_of_a_model(arguments, message):
    with pytest.raises(UserError, match=message):
        refused(build, *arguments)
        build(arguments)


@pytest.mark.parametrize("text", ["5", "null", "true", "NaN", "[]", '"a"', "[" * 1000, '{"a":' * 1000, "",
                                  f'{{"heads": {LONGER}}}', '{"heads": [3], "heads ": [[[1]]]}'])  # fmt: skip
def test_model_files(text, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(text)
    assert refused(build, "--model", str(path)).startswith("model")


@pytest.mark.parametrize("text", ["steps: !!int 'abc'", "steps: null", "seed: null", "model: null", "data:",
                                  "optimizer: null", "optimizer: {eps: null}", "5", "[" * 1000, "{a: " * 1000,
                                  "steps: !!timestamp 'x'", "!!int 'abc'", "steps: 2026-13-45"])  # fmt: skip
def test_recipes(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert "recipe.yaml" in refused(build, "--config", str(path))


@pytest.mark.parametrize(
    "value", ["!!int 'abc'", "!!timestamp 'abc'", "[" * 1000, "{a: " * 1000, "!!set {a}"]
)
@pytest.mark.parametrize("flag", ["steps", "lr_rules", "architecture"])
def test_yaml_in_flags(flag, value):
    assert flag in refused(build, f"--{flag}", value)


@pytest.mark.parametrize("weight", ["1e999", "1e-99999999", "1e99999999", LONG, LONGER, "1/0", "0", "-1"])
def test_weights_of_a_blend(weight):
    assert "weight for 'x'" in refused(lambda arguments: parse_blend(arguments[0]), f"x:{weight}")
    assert "weight for 'y'" in refused(lambda arguments: parse_blend(arguments[0]), f"x:0.5,y:{weight}")


@pytest.mark.parametrize("value", ["1e400", "nan", "inf", "1e12", "0", LONG], ids=lambda text: text[:6])
def test_options_of_the_plan(value):
    assert "gpu_memory: " in refused(read_arguments, "--gpu_memory", value)


def test_nodes_of_the_plan():
    assert "nodes: " in refused(read_arguments, "--nodes", LONG)
