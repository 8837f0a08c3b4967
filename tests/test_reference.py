"""The generated pages of docs/reference/."""

import dataclasses

from docs import reference
from pretrain.cli import COMMANDS
from pretrain.config.run_config import RunConfig


def test_every_command_has_its_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = reference.commands_page()
    assert page.count("```text\nusage: ") == len(COMMANDS) + 7  # subcommands of study
    assert page.count("```text\nusage: head-schedules study") == 8
    assert "### study report" in page
    assert "--train_tokenizer" in page


def test_every_setting_has_a_row():
    page = reference.settings_page()
    names = {item.name for item in dataclasses.fields(RunConfig)}
    assert {name for name in names if f"`{name}`" not in page and f"`{name}." not in page} == set()


def test_flags_of_other_projects_are_listed():
    page = reference.flags_page()
    assert "| `adam_epsilon` | `--optimizer.eps` |" in page and "`hidden_size`, `n_embd`" in page
