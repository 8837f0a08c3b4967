"""``head-schedules``: every command of the project under one name.

    head-schedules train --config micro --name first
    head-schedules study run direction-small --parallel 2

Commands that print what to type next use this spelling.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from model.errors import UserError, quote, suggest
from model.presets import preset_names
from pretrain.config.command_line import CommandParser
from pretrain.config.sources import DS_CONFIGS, recipe_names
from pretrain.runtime.command import run_command
from pretrain.study.file import study_names

PROGRAM = "head-schedules"
TRAIN = "train a model, or resume a run, on one process"
COMPLETION = "print a script for the shell's completion"
ZSH = (
    "(( ${+functions[compdef]} )) || { autoload -Uz compinit && compinit; }",
    "autoload -U +X bashcompinit && bashcompinit",
)
BASH = "~/.local/share/bash-completion/completions"
SHELLS = {
    "bash": f"mkdir -p {BASH}; {PROGRAM} completion bash > {BASH}/{PROGRAM}",
    "zsh": f"{PROGRAM} completion zsh > ~/.{PROGRAM}.zsh; echo 'source ~/.{PROGRAM}.zsh' >> ~/.zshrc",
}
COMMANDS: Mapping[str, tuple[str, str]] = {
    "convert": ("pretrain.convert", "convert checkpoints to and from Hugging Face"),
    "evaluate": ("pretrain.evaluation.command", "score models with lm-eval, zero-shot or few-shot"),
    "diagnose": ("pretrain.diagnostics.command", "measure attention, residual writes and weights by layer"),
    "growth": ("pretrain.growth.__main__", "report what grew, and what each head is worth"),
    "plot": ("pretrain.plots.command", "draw the curves of runs, side by side"),
    "presets": ("pretrain.presets", "list the available models, and draw them"),
    "prepare": ("pretrain.prepare.command", "make a corpus from your text, or from the hub"),
    "plan": ("pretrain.plan.command", "compute memory, communication and time of a run"),
    "generate": ("pretrain.generate", "continue a text with a trained model"),
    "study": ("pretrain.study.command", "train and compare variants over seeds"),
}
"""Module with a ``main`` and description of each command except train."""
FLAG = re.compile(r"^  (?:-\w, )?(--[a-z][\w.]*)(?: \{([^}]*)\})?", re.MULTILINE)
"""A flag and the values that it takes, as argparse lists them."""
WORDS = re.compile(r"^    ([a-z]\w*)  ", re.MULTILINE)
"""Subcommands, as argparse lists them."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command that is named first; its exit code is its own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name == "train":
        _train(given[1:])
    if name in COMMANDS:
        run: Callable[[list[str] | None], int] = importlib.import_module(COMMANDS[name][0]).main
        if arguments is not None:
            return run(given[1:])
        del sys.argv[1]
        return run(None)
    return run_command(_answer, arguments)


def _answer(arguments: list[str]) -> None:
    """What is not handed on: help, the version, completion, and unknown commands."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Pretrain decoders whose layers differ. Run COMMAND --help for its options.",
        allow_abbrev=False,
    )
    version = importlib.metadata.version("head-schedules")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    every = {"train": TRAIN} | {name: text for name, (_, text) in COMMANDS.items()}
    every["completion"] = COMPLETION
    if arguments and not arguments[0].startswith("-") and arguments[0] not in every:
        valid = ", ".join(every) + suggest(arguments[0], every)
        raise UserError(f"command: {quote(arguments[0])} is not valid; commands are {valid}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, text in every.items():
        epilog = "\n  ".join(["install it with:", *SHELLS.values()]) if name == "completion" else None
        made = subparsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # commands are not wrapped
            allow_abbrev=False,
        )
        if name == "completion":
            made.add_argument("shell", choices=list(SHELLS))
    options = parser.parse_args(arguments)
    if options.command == "completion":
        print(completion(options.shell), end="")
    else:
        parser.print_help()


def _train(arguments: list[str]) -> NoReturn:
    from pretrain.main import start

    sys.argv[1:] = arguments
    start()


# ---------------------------------------------------------------------- completion


def completion(shell: str) -> str:
    """A script that completes commands, their subcommands and their flags; files elsewhere.

    It holds the names that exist now: print it again after an update.
    """
    texts = {name: help_texts(name) for name in ("train", *COMMANDS)}
    names = [*texts, "completion"]
    cases = [f"    {name}) words={_quote_words(_words(texts, name))} ;;" for name in texts]
    cases.append(f"    completion) words={_quote_words(SHELLS)} ;;")
    values = [f"    {flag}) words={_quote_words(each)} ;;" for flag, each in _values(texts).items()]
    studies = _quote_words(study_names())
    lines = [
        *(ZSH if shell == "zsh" else []),
        "_head_schedules() {",
        '  local words="" current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '  if [ "$COMP_CWORD" = 1 ]; then',
        f"    words={_quote_words(names)}",
        "  else",
        '    case "${COMP_WORDS[1]}" in',
        *(f"  {case}" for case in cases),
        "    esac",
        f'    if [ "${{COMP_WORDS[1]}} $COMP_CWORD" = "study 3" ]; then words+=" "{studies}; fi',
        '    case "$previous" in',
        *(f"  {case}" for case in values),
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        f"complete -o default -F _head_schedules {PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _quote_words(words: Iterable[str]) -> str:
    return '"' + " ".join(words) + '"'


def _words(texts: Mapping[str, Mapping[str, str]], name: str) -> list[str]:
    """Subcommands and flags of a command, from its help texts; those of train also for plan."""
    flags = [match[1] for text in texts[name].values() for match in FLAG.finditer(text)]
    named: Iterable[str] = list(texts[name])[1:]
    if name == "presets":
        named = [*named, *preset_names()]
    if name == "plan":
        flags += _words(texts, "train")
    return list(dict.fromkeys([*named, *flags]))


def _values(texts: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """What follows a flag, where that is a choice among few names."""
    ds_configs = sorted(path.stem for path in DS_CONFIGS.glob("*.json"))
    values = {"--config": recipe_names(), "--model": preset_names(), "--ds_config": ds_configs}
    for text in (text for each in texts.values() for text in each.values()):
        for flag, choices in FLAG.findall(text):
            if choices:
                values.setdefault(flag, []).extend(choices.split(","))
    return {flag: list(dict.fromkeys(each)) for flag, each in values.items()}


def help_texts(name: str) -> dict[str, str]:
    """What a command and its subcommands print for --help: its own under "", then by subcommand."""
    own = _help(name, [])
    # argparse does not list those of a command that also works without one.
    module = None if name == "train" else importlib.import_module(COMMANDS[name][0])
    subcommands = getattr(module, "SUBCOMMANDS", None) or WORDS.findall(own)
    return {"": own} | {subcommand: _help(name, [subcommand]) for subcommand in subcommands}


def _help(name: str, arguments: list[str]) -> str:
    """What a command prints for --help."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        if name == "train":
            from pretrain.config.command_line import parse_command_line

            parse_command_line([*arguments, "--help"])
        else:
            importlib.import_module(COMMANDS[name][0]).main([*arguments, "--help"])
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
