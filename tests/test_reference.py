"""The generated pages of docs/reference/."""

import dataclasses

from docs import reference
from pretrain.cli import COMMANDS
from pretrain.config.run_config import RunConfig


def test_every_command_has_its_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = reference.commands_page()
    assert page.count("```text\nusage: ") == len(COMMANDS) + 6  # subcommands of study
    assert page.count("```text\nusage: head-schedules study") == 7
    assert "### study report" in page
    assert "--train_tokenizer" in page


def test_every_setting_has_a_row():
    page = reference.settings_page()
    names = {item.name for item in dataclasses.fields(RunConfig)}
    assert {name for name in names if f"`{name}`" not in page and f"`{name}." not in page} == set()
