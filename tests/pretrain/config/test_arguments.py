"""Arguments of every command that are empty or no text: one line names the flag."""

import re
from importlib import import_module

import pytest

from model.errors import UserError
from pretrain.cli import COMMANDS
from pretrain.config.command_line import parse_command_line
from pretrain.config.sources import FLAG_NAMES

INNER = {
    "prepare": ["inspect", "verify", "labelled"],
    "presets": ["allocations", "exchange"],
    "evaluate": ["save"],
    "study": ["run", "list", "report", "record", "power", "task", "schema"],
}
EVERY = [(name, *inner.split()) for name in COMMANDS for inner in ["", *INNER.get(name, [])]]
MAY_BE_EMPTY = {"--prompt"}


def run(command, arguments, capsys):
    capsys.readouterr()
    main = import_module(COMMANDS[command[0]][0]).main
    return main([*command[1:], *arguments]), capsys.readouterr()


@pytest.mark.parametrize("command", EVERY, ids="-".join)
def test_every_flag_of_every_command(command, capsys):
    with pytest.raises(SystemExit):
        run(command, ["--help"], capsys)
    text = capsys.readouterr().out.partition("usage")[2]
    flags = [*dict.fromkeys(re.findall(r"^ +(--[a-z_]+) [A-Z{\[]", text, re.MULTILINE))]
    for flag in flags:
        for value in ("", " ", "\udcff", "a\udc80\x1b[31m"):
            if flag not in MAY_BE_EMPTY or value.strip():
                code, said = run(command, [flag, value], capsys)
                assert (code, said.out, said.err.count("\n")) == (2, "", 1), (flag, said)
                assert said.err.startswith(f"error: {flag}: ") and said.err[:-1].isprintable(), (
                    flag,
                    said.err,
                )
    code, said = run(command, ["--no_such_flag", "1\x1b[31m"], capsys)
    assert code == 2 and said.err.count("\n") == 1 and "usage" not in said.err and "\x1b" not in said.err


@pytest.mark.parametrize("flag", ["--config", "--ds_config", "--plot_lr", *FLAG_NAMES])
def test_every_flag_of_a_training(flag):
    for value in ("", "\udcff"):
        with pytest.raises(UserError, match=f"^{flag}: "):
            parse_command_line([flag, value])
