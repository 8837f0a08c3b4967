"""Parses main.py's flags, and defines the argument parser of every other command."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser

from model.config import ModelConfig
from model.errors import UserError, quote
from pretrain.config.flag_aliases import OTHER_NAMES, suggest_flag
from pretrain.config.run_config import DEFAULT_RECIPE, RunConfig
from pretrain.config.sources import (
    FLAGS,
    TEXTS,
    find_ds_config,
    flatten,
    load_recipe,
    make_run,
    plain_value,
    recipe_names,
)
from pretrain.utils.parsing import format_yaml, parse_yaml

GROUPS = {
    "Task, model and data": "task model init_from heads architecture data document_mask tokenizer data_root "
    "vocab_size",
    "Length and batches": "seed steps global_batch_tokens micro_batch",
    "Learning-rate rules": "lr_rules",
    "Parallelism": "tensor_parallel sequence_parallel context_parallel",
    "Speed, memory and precision": "precision activation_checkpointing compile fused attention threads "
    "deterministic profile",
    "Skipped updates": "max_skipped_steps skip_spikes",
    "Measurements and hooks": "diagnostics_every hooks",
    "Run folder": "name runs_dir resume recipe",
}
"""The settings outside of sections, by what they are about; a test finds those that are missing."""

OTHERWISE = ("architecture.vocab_size", "architecture.heads", "architecture.classes")
"""Fields of a model that other settings give; not listed."""


@dataclass(frozen=True)
class CommandLine:
    """The parsed arguments of main.py: the run, and the ds_config that it uses."""

    run: RunConfig
    ds_config: str
    plot_lr: str | None = None
    """Draw the learning rates into this file instead of training."""
    print_config: bool = False
    """Print the run as a recipe instead of training."""
    verbose: bool = False
    """Print all opening lines."""


def parse_command_line(arguments: list[str]) -> CommandLine:
    """Turn main.py's arguments into a checked RunConfig.

    Raises:
        UserError: an unknown flag or key (with the closest valid name), a value of the wrong type, a recipe
            that is missing or is not a YAML mapping.
    """
    described = any(argument == "--help" or argument.startswith("-h") for argument in arguments)
    given = vars(_build_parser(described).parse_args(arguments))
    flags = {name: _flag_value(name, given[name]) for name in FLAGS if given[name] is not None}
    run = make_run(load_recipe(given["config"]).merge(flatten(flags, "the flags")))
    programs = {name: given[name] for name in ("plot_lr", "print_config", "verbose")}
    return CommandLine(run, find_ds_config(given["ds_config"]), **programs)


def _flag_value(name: str, text: str) -> Any:
    """The value of a flag: text as it is given, or read as YAML. ``null`` unsets a text that may be unset."""
    if name not in TEXTS:
        return parse_yaml(text, name)
    return None if text == "null" and TEXTS[name] else text


def documentation(kind: Any) -> dict[str, str]:
    """The docstring below each field of a declared class, by the field's name."""
    return {
        entry.arg_name: (entry.description or "").replace("%", "%%")
        for base in kind.__mro__
        if dataclasses.is_dataclass(base)
        for entry in docstring_parser.parse_from_object(base).params
    }


@functools.cache
def _build_parser(described: bool) -> CommandParser:
    """The parser of main.py's flags; with *described* it has their texts, which take a tenth of a second."""
    parser = CommandParser(
        usage="head-schedules train [--config RECIPE] [--FIELD VALUE ...]\n"
        "       deepspeed --module pretrain.main [--config RECIPE] [--FIELD VALUE ...]",
        allow_abbrev=False,
        description="Pretrain a decoder with any head count per layer. Recipes: "
        + ", ".join(recipe_names())
        + ". Defaults apply to fields that a recipe leaves out. Without --config the recipe is "
        f"{DEFAULT_RECIPE}, which sets some of them: --print_config shows what a run uses.",
    )
    parser.other_names = OTHER_NAMES
    parser.add_argument(
        "--config",
        help="Recipe: a name from pretrain/recipes or a YAML file. Without it, the recipe "
        f"{DEFAULT_RECIPE}; your own file takes nothing from {DEFAULT_RECIPE}.",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="Check the settings, print them as a recipe, and stop. Data and ranks are not looked at.",
    )
    parser.add_argument(
        "--ds_config",
        default="ds_configs/zero2.json",
        help="DeepSpeed configuration: a file, or the name of one in ds_configs, such as zero2.",
    )
    parser.add_argument(
        "--plot_lr", metavar="FILE", help="Draw every group's learning rate over the run into FILE, and stop."
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="Also print the reason for each automatic choice, the source of the text and how MFU is "
        "computed. The run is the same with and without this flag.",
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # passed by the launcher; ignored
    if described:
        _describe_settings(parser)
    else:
        for name in FLAGS:
            parser.add_argument(f"--{name}")
    return parser


def _describe_settings(parser: CommandParser) -> None:
    """Add the settings as flags, in groups, with their values, texts and defaults."""
    for title, names in GROUPS.items():
        _add_settings(parser.add_argument_group(title), RunConfig, names.split())
    for section in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(kind := section.default_factory):
            _add_settings(parser.add_argument_group(section.name), kind, prefix=section.name)
    model = parser.add_argument_group("architecture", "fields of the model; those not given are the preset's")
    _add_settings(model, ModelConfig, prefix="architecture")
    model.add_argument("--architecture.num_layers", metavar="INT", help="Another number of layers.")


def _add_settings(
    group: argparse._ArgumentGroup, kind: Any, only: Container[str] = (), prefix: str = ""
) -> None:
    """Add the fields of *kind*, or *only* some of them, as flags with their values, texts and defaults."""
    helps = documentation(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        name = f"{prefix}.{field.name}" if prefix else field.name
        if name not in FLAGS or (only and field.name not in only):
            continue
        if name in OTHERWISE:
            group.add_argument(f"--{name}", help=argparse.SUPPRESS)
            continue
        help, default = helps[field.name], default_of(field)
        if default not in (None, dataclasses.MISSING) and kind is not ModelConfig:
            help += f" (default: {yaml_text(default)})"
        group.add_argument(f"--{name}", metavar=describe_values(hints[field.name]), help=help)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a declared field; dataclasses.MISSING if it has none."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def describe_values(hint: Any) -> str:
    """The placeholder of a flag in help texts, by the type of its field: ``{adamw,muon}``, ``INT``."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_values(parts[0])
    if origin is Literal:
        return "{" + ",".join(map(yaml_text, parts)) + "}"
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(describe_values(part) for part in parts if part is not NoneType))
    if hint is bool:
        return "{true,false}"
    return {int: "INT", float: "FLOAT", tuple: "LIST", dict: "MAPPING", Path: "PATH"}.get(
        origin or hint, "TEXT"
    )


def yaml_text(value: Any) -> str:
    """The value of a setting as YAML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    return format_yaml(plain_value(value, "default")).removesuffix("...\n").strip()


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises UserError for bad arguments, as for every other bad input."""

    other_names: Mapping[str, str] = {"version": OTHER_NAMES["version"]}
    """What to give in place of flags that other programs have; see pretrain.config.flag_aliases."""
    may_be_empty: Container[str] = ()
    """Arguments whose value may be an empty text."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse, with a flag's type as its placeholder: ``--nodes INT``."""
        if "type" in options and names[0].startswith("-") and "choices" not in options:
            options.setdefault("metavar", describe_values(options["type"]))
        return super().add_argument(*names, **options)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The values of an argument, as argparse reads them; empty texts, and bytes that are not text, are
        rejected."""
        name = max(action.option_strings, key=len, default=action.dest)
        for text in arg_strings if action.nargs not in (argparse.PARSER, argparse.REMAINDER) else ():
            if not text.strip() and action.dest not in self.may_be_empty:
                raise UserError(f"{name}: {text!r} is empty; give a value, or leave it out")
            if text == "--" and action.option_strings:  # argparse would give an empty list
                raise UserError(f"{name}: '--' is no value")
            if not text.isprintable() and text != text.encode(errors="ignore").decode():
                raise UserError(f"{name}: {quote(text)} is not UTF-8 text; give a name that is")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        unknown = "unrecognized arguments: "
        if message.startswith(unknown + "-"):
            flag = message.removeprefix(unknown).split()[0].partition("=")[0]
            if having := [name for name, parser in self._commands().items() if flag in parser._flags()]:
                message = f"{flag}: not a flag of this command, but of {' and '.join(map(repr, having))}"
            else:
                message = f"{flag}: unknown flag{suggest_flag(flag, self._flags(), self.other_names)}"
        elif message.startswith(unknown):
            given = message.removeprefix(unknown)
            message = f"{quote(given, plain=bool(given.strip()))}: not expected here"
            if given.replace(" ", "").isdecimal():
                message += f"; write a list with commas, such as {','.join(given.split())}"
        elif choice := re.match(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message):
            valid = choice[3].replace("'", "")
            message = f"{choice[1].lower()}: {choice[2]} is not valid; give one of {valid}"
        raise UserError(message)

    def _commands(self) -> dict[str, CommandParser]:
        """The parsers of the commands within this one, by name; argparse reports their unknown flags here."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in nested for name, parser in action.choices.items()}

    def _flags(self) -> list[str]:
        """Every flag once, those of commands within this one included."""
        own = [flag for action in self._actions for flag in action.option_strings]
        nested = [flag for parser in self._commands().values() for flag in parser._flags()]
        return list(dict.fromkeys([*own, *nested]))
