"""An import is never begun from scratch, nor is that advised."""

from __future__ import annotations

import dataclasses
import json

import yaml

from model.presets import preset
from pretrain.checkpoint.state import TrainingState
from pretrain.config.command_line import parse_command_line
from pretrain.run.resume import check_imported, is_imported, settings_to_give
from tests.helpers.refusals import refused


def test_the_settings_of_an_import_do_not_begin_a_run(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(preset("prism-nano").to_json()))
    (tmp_path / "mine.json").write_text((tmp_path / "model.json").read_text())
    recipe = {"model": f"{tmp_path}/model.json", "name": "qwen", "recipe": "imported"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    imported = parse_command_line(["--config", f"{tmp_path}/config.yaml", "--name", "q4"]).run
    with refused("runs/q4", "without the imported weights", f"--init_from {tmp_path}", begins="name: "):
        check_imported(imported)
    check_imported(parse_command_line(["--model", f"{tmp_path}/model.json"]).run)
    check_imported(dataclasses.replace(imported, model=f"{tmp_path}/mine.json"))


def test_advice_keeps_imported_weights():
    own = TrainingState(run={"seed": 1})
    for state in (TrainingState(), TrainingState(run={"seed": 1}, imported=True)):
        assert is_imported(state) and "--init_from" in settings_to_give(is_imported(state))
    assert not is_imported(own) and "--name for a new run" in settings_to_give(is_imported(own))
