"""Parses main.py's flags and recipes, and defines the argument parser of every other command."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml

from model.errors import UserError, closest, shown
from pretrain.config.names import OTHER_NAMES, suggestion
from pretrain.config.run_config import DEFAULT_RECIPE, RunConfig
from pretrain.utils.parsing import parse_yaml, read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "pretrain" / "recipes"


@dataclass(frozen=True)
class CommandLine:
    """The parsed arguments of main.py: the run, and the ds_config that it uses."""

    run: RunConfig
    ds_config: str
    plot_lr: str | None = None
    """Draw the learning rates into this file instead of training."""
    print_config: bool = False
    """Print the run as a recipe instead of training."""
    left_out: tuple[str, ...] = ()
    """Fields of a shipped recipe whose extension is not here."""


def parse_command_line(arguments: list[str]) -> CommandLine:
    """Turn main.py's arguments into a checked RunConfig.

    Raises:
        UserError: an unknown flag or key (with the closest valid name), a value of the wrong type, a recipe
            that is missing or is not a YAML mapping.
    """
    parser = _build_parser()
    arguments, left_out = _resolve_recipe(list(arguments))
    _check_flags(arguments, parser)
    _check_values(arguments)
    try:
        parsed = parser.parse_args(arguments)
        instance = parser.instantiate(parsed)
    except (ArgumentError, jsonargparse.ArgumentError) as error:
        raise UserError(_one_line(str(error))) from None
    if instance.plot_lr is not None and not instance.plot_lr.strip():
        raise UserError("plot_lr: no file given; give the name of a picture, such as lr.png")
    values = {f.name: getattr(instance, f.name) for f in dataclasses.fields(RunConfig)}
    return CommandLine(
        RunConfig(**values),
        find_ds_config(instance.ds_config),
        instance.plot_lr,
        instance.print_config,
        left_out,
    )


def load_run_config(path: str | Path) -> RunConfig:
    """Read the config.yaml of a run folder.

    Raises:
        UserError: the file is missing or does not hold a RunConfig.
    """
    try:
        return parse_command_line(["--config", str(path), "--ds_config", "unused"]).run
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {str(error).strip().rstrip(':')}") from None


@functools.cache
def _build_parser() -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="deepspeed pretrain/main.py",
        exit_on_error=False,
        print_config=None,  # ours, below, prints a recipe and checks it first
        description="Pretrain a decoder with any head count per layer. Recipes: "
        + ", ".join(recipe_names())
        + ". The defaults below are those of a recipe that leaves the field out. They are not the default "
        f"run's: its recipe, {DEFAULT_RECIPE}, sets some of them, and --print_config shows what it uses.",
    )
    parser.add_argument(
        "--config",
        action="config",
        help="Recipe: a name from pretrain/recipes or a YAML file. Without it, the recipe "
        f"{DEFAULT_RECIPE}; a file of your own takes nothing from {DEFAULT_RECIPE}.",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="Check the settings, print them as a recipe, and stop. Data and ranks are not looked at.",
    )
    parser.add_argument(
        "--ds_config",
        type=str,
        default="ds_configs/zero2.json",
        help="DeepSpeed configuration, looked for in the working directory, then in this project.",
    )
    parser.add_argument(
        "--plot_lr", metavar="FILE", help="Draw every group's learning rate over the run into FILE, and stop."
    )
    parser.add_argument("--local_rank", type=int, default=0, help="Passed by the launcher; ignored.")
    _without_ranges(RunConfig)
    parser.add_class_arguments(RunConfig)
    for action in parser._actions:
        if action.dest in ("recipe", "local_rank"):  # set by --config, and by the launcher
            action.help = argparse.SUPPRESS
    return parser


def _without_ranges(config_class: Any) -> None:
    """Leave the parser the types alone: ranges are checked, and put into words, when the RunConfig is
    made."""
    types = typing.get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        item.type = config_class.__init__.__annotations__[item.name] = types[item.name]
        if dataclasses.is_dataclass(item.type):
            _without_ranges(item.type)


def find_ds_config(name: str) -> str:
    """Path of a ds_config that was given as *name*: from the working directory, else from this project's
    root."""
    return str(ROOT / name) if not _is_file(Path(name)) and _is_file(ROOT / name) else name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def recipe_names() -> list[str]:
    """The recipes that come with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name_or_path: str, what: str = "config") -> Path:
    """The file of a recipe's name or path; messages begin with *what*.

    Raises:
        UserError: there is none; it names the closest.
    """
    path = Path(name_or_path)
    if not _is_file(path):
        path = RECIPES / f"{name_or_path}.yaml"
    if not _is_file(path):
        raise UserError(
            f"{what}: no recipe or file {shown(name_or_path)}; recipes are {', '.join(recipe_names())}"
            + closest(name_or_path, recipe_names())
        )
    return path


def read_recipe(path: Path, what: str = "config") -> dict[str, Any]:
    """The fields of a recipe's file; their names are not checked.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    recipe = read_yaml(path, what) or {}
    if not isinstance(recipe, dict):
        raise UserError(
            f"{what}: {path} holds a {type(recipe).__name__}; it must be a mapping of RunConfig fields"
        )
    return recipe


def _resolve_recipe(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Point --config at a file (the default recipe when absent), check its keys, and name the recipe.

    Returns:
        The arguments, and fields that were left out: a shipped recipe may set those of an extension that is
            not here.
    """
    name_or_path, other_arguments = DEFAULT_RECIPE, []
    remaining = iter(arguments)
    for argument in remaining:  # the last one counts, as with any flag: scripts give one, their users another
        if argument == "--config":
            name_or_path = next(remaining, "")
        elif argument.startswith("--config="):
            name_or_path = argument.split("=", 1)[1]
        elif argument.split("=", 1)[0] == "--recipe":
            raise UserError("--recipe: not a flag; --config chooses a recipe, --name names the run's folder")
        else:
            other_arguments.append(argument)
            continue
        if not name_or_path:
            raise UserError("config: no value given; give a recipe name or a YAML file")
    path = find_recipe(name_or_path)
    recipe = read_recipe(path)
    left_out: tuple[str, ...] = ()
    if path.parent == RECIPES:
        known = {f.name for f in dataclasses.fields(RunConfig)}
        left_out = tuple(name for name in recipe if name not in known)
        recipe = {name: value for name, value in recipe.items() if name in known}
    _check_keys(recipe, RunConfig, source=str(name_or_path))
    recipe_flag = [] if "recipe" in recipe else ["--recipe", path.stem]
    config = yaml.safe_dump(recipe) if left_out else str(path)  # the parser takes a file or its text
    return ["--config", config, *recipe_flag, *other_arguments], left_out


def _check_keys(values: dict[str, Any], config_class: type, source: str, prefix: str = "") -> None:
    valid = {f.name: f for f in dataclasses.fields(config_class)}
    for key, value in values.items():
        if key not in valid:
            raise UserError(
                f"{prefix}{shown(key, plain=True)}: unknown key in {source}"
                + (
                    _key_suggestion(shown(key, plain=True), prefix, valid)
                    or f"; valid keys are {', '.join(valid)}"
                )
            )
        if value is None and type(None) not in typing.get_args(_type(config_class, key)):
            raise UserError(
                f"{prefix}{key}: null in {source} is not valid; give a value, or leave the key out"
            )
        nested = valid[key].default_factory
        if dataclasses.is_dataclass(nested):
            if not isinstance(value, dict):
                raise UserError(f"{prefix}{key}: {shown(value)} in {source} is not a mapping")
            _check_keys(value, nested, source, f"{prefix}{key}.")  # type: ignore[arg-type]


def _type(config_class: type, name: str) -> Any:
    """The declared type of a field; a union or a class."""
    return typing.get_type_hints(config_class)[name]


def _key_suggestion(key: str, prefix: str, valid: Iterable[str]) -> str:
    """A hint at what *key* may mean: a key of the same mapping, or the one that other programs call so."""
    if not prefix and key in OTHER_NAMES:
        return f"; here that is {OTHER_NAMES[key].replace('--', '')}"
    return closest(key, valid)


def _check_flags(arguments: list[str], parser: jsonargparse.ArgumentParser) -> None:
    valid = [
        option for action in parser._actions for option in action.option_strings if option.startswith("--")
    ]
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag not in valid and not flag.startswith("--architecture."):
            raise UserError(
                f"{flag}: unknown flag" + (suggestion(flag, valid) or "; --help lists the valid ones")
            )


def _check_values(arguments: list[str]) -> None:
    """Refuse values that would make the parser hang or fail: it reads each as YAML, recursively."""
    text_fields = {f"--{name}" for name in _text_fields(RunConfig)}
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = flag.partition("=")
        if name.startswith("--") and name not in {*text_fields, "--config", "--ds_config", "--plot_lr"}:
            parse_yaml(value if equals else following, name.removeprefix("--"))


def _text_fields(config_class: Any, prefix: str = "") -> Iterator[str]:
    """Names of the fields that hold plain text, nested ones with dots."""
    for f in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(f.default_factory):
            yield from _text_fields(f.default_factory, f"{prefix}{f.name}.")
        elif _type(config_class, f.name) in (str, str | None):
            yield prefix + f.name


def _one_line(message: str) -> str:
    message = " ".join(message.split()).removeprefix("Parser key ")
    message = (
        message.replace("typing.Literal", "one of ")
        .replace("Expected a <class '", "expected <")
        .replace("'>.", ">.")
    )
    return shown(message, limit=400, plain=True)


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises UserError for bad arguments, as for every other bad input."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            unknown_flag = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            hint = closest(unknown_flag, self._flags())
        raise UserError(message + hint)

    def _flags(self) -> list[str]:
        """Every flag, those of commands within the command included: argparse reports them all from here."""
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser._flags() if isinstance(parser, CommandParser) else []
        return flags
