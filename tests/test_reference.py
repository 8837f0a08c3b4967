"""The generated pages of docs/reference/."""

import json

import pytest

from docs import hardware, reference
from pretrain.cli import COMMANDS
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import FLAGS, SETTINGS, make_run
from pretrain.plan.command import run_plan
from pretrain.utils.parsing import parse_yaml


def test_every_command_has_its_help():
    page = reference.commands_page()
    assert page.count("```text\nusage: ") == len(COMMANDS) + 7 + 7  # subcommands of study and of others
    assert page.count("```text\nusage: head-schedules study") == 8
    assert "### study report" in page and "### prepare labelled" in page
    assert "--train_tokenizer" in page and "--text_column" in page


@pytest.fixture(scope="module")
def settings() -> dict[str, list[str]]:
    """The lines below each setting's name."""
    entries = reference.settings_page().split("```{confval} ")[1:]
    return {lines[0]: lines[1:] for entry in entries if (lines := entry.splitlines())}


def test_every_setting_is_listed_once(settings):
    page = reference.settings_page()
    assert {name for name in [*SETTINGS, *FLAGS] if page.count(f"```{{confval}} {name}\n") != 1} == set()
    assert [name for name, lines in settings.items() if not lines[4].strip("`")] == []


def test_settings_have_types_and_defaults_as_yaml_writes_them(settings):
    def shown(name):
        return settings[name][:2]

    assert shown("steps") == [":type: integer ≥ 1", ":default: `1000`"]
    assert shown("optimizer.eps") == [":type: number > 0", ":default: `1.0e-08`"]
    assert shown("optimizer.betas") == [":type: list of 2 numbers in [0, 1)", ":default: `[0.9, 0.95]`"]
    assert shown("compile") == [":type: `auto`, `true` or `false`", ":default: `auto`"]
    assert shown("muon.heads") == [":type: `whole` or `each`, or integer ≥ 1", ":default: `whole`"]
    assert shown("maturity.settled") == [":type: number in (0, 1]", ":default: `0.5`"]
    assert shown("heads") == [":type: string, or list of integers ≥ 0, or `null`", ":default: `null`"]
    assert shown("architecture.rope_base") == [
        ":type: number > 0, or list of numbers > 0 or `null`, or string, or `null`",
        ":default: `10000.0`",
    ]
    assert shown("lr_rules[].layers") == [":type: list of integers or strings", ":default: `[all]`"]
    assert shown("architecture.d_model") == [":type: integer ≥ 1", ":default: required"]


def test_defaults_are_valid_yaml_of_the_same_value(settings):
    """As a recipe they give the settings without a recipe."""
    given = {}
    for name in FLAGS:
        if name in SETTINGS:
            _, _, text = settings[name][1].partition(":default: ")
            given[name] = parse_yaml(text.strip("`"), name)
    assert make_run(given) == RunConfig()


def test_schemas_are_written_and_linked(tmp_path):
    reference.write_reference(tmp_path)
    for page, name in (("commands", "study.schema.json"), ("metrics", "metrics.schema.json")):
        assert f"]({name})" in (tmp_path / f"{page}.md").read_text(encoding="utf-8")
        assert json.loads((tmp_path / name).read_text(encoding="utf-8"))["type"] == "object"


def test_flags_of_other_projects_are_listed():
    page = reference.flags_page()
    assert "`adam_epsilon`, `--adam-eps`, `--adam-epsilon` | `--optimizer.eps` |" in page
    assert "`hidden_size`, `n_embd`" in page and "`--micro-batch-size`" in page


def test_hardware_is_what_the_command_computes(capsys):
    command = "--config 757m --gpu h100 --gpus_per_node 8 --mfu 0.4 --json"
    run_plan(command.split())
    planned = json.loads(capsys.readouterr().out)
    memory, hours = hardware.describe_need(hardware.plan_recipe("757m", 8)).split(" | ")
    assert int(memory) == round(planned["memory_bytes"]["peak"] / 2**30)
    assert float(hours) == pytest.approx(planned["seconds"] / 3600, rel=5e-3)
