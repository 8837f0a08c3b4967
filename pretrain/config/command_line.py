"""Parses main.py's flags and recipes, and defines the argument parser of every other command."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import docstring_parser

from model.config import ModelConfig
from model.declared import from_plain
from model.errors import UserError, closest, shown
from model.presets import preset_names
from pretrain.config.names import OTHER_NAMES, suggestion
from pretrain.config.run_config import DEFAULT_RECIPE, RunConfig
from pretrain.utils.parsing import parse_yaml, read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "pretrain" / "recipes"
DS_CONFIGS = ROOT / "pretrain" / "ds_configs"
"""In the repository a link to ds_configs/."""


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


def parse_command_line(arguments: list[str], settings: Mapping[str, Any] | None = None) -> CommandLine:
    """Turn main.py's arguments into a checked RunConfig.

    Args:
        settings: fields of a recipe that count more than its own, and less than flags.

    Raises:
        UserError: an unknown flag or key (with the closest valid name), a value of the wrong type, a recipe
            that is missing or is not a YAML mapping.
    """
    given = vars(_build_parser().parse_args(arguments))
    chosen = _known(settings or {}, "the settings")
    if isinstance(architecture := chosen.get("architecture"), Mapping):  # the recipe's other fields stay
        del chosen["architecture"]
        chosen |= {f"architecture.{name}": value for name, value in architecture.items()}
    for name in FLAGS:
        if (text := given[name]) is not None:
            chosen[name] = text if name in TEXTS else parse_yaml(text, name)
    recipe_name = given["config"] or DEFAULT_RECIPE
    path = find_recipe(recipe_name)
    recipe = read_recipe(path)
    left_out: list[str] = []
    if path.parent == RECIPES:  # it may set fields of an extension that is not here
        known_here = {item.name for item in dataclasses.fields(RunConfig)}
        left_out = [name for name in recipe if name not in known_here]
        recipe = {name: value for name, value in recipe.items() if name not in left_out}
    values = {"recipe": path.stem} | _known(recipe, recipe_name)
    if given["config"] is None and chosen.get("model") not in (None, *preset_names()):
        # A file or a run's folder says everything about the model: the default recipe only trains it.
        values.pop("architecture", None)
    return CommandLine(
        from_plain(RunConfig, _nested(values | chosen)),
        find_ds_config(given["ds_config"]),
        given["plot_lr"],
        given["print_config"],
        tuple(left_out),
    )


def run_of_recipe(recipe: Mapping[Any, Any], where: str) -> RunConfig:
    """The RunConfig of a recipe's fields; messages call the recipe *where*.

    Raises:
        UserError: an unknown key (with the closest valid name), a value of the wrong type.
    """
    return from_plain(RunConfig, _nested(_known(recipe, where)))


def load_run_config(path: str | Path) -> RunConfig:
    """Read the config.yaml of a run folder.

    Raises:
        UserError: the file is missing or does not hold a RunConfig.
    """
    try:
        file = find_recipe(str(path))
        return run_of_recipe({"recipe": file.stem} | read_recipe(file), str(path))
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from None


# ---------------------------------------------------------------------- settings and their flags


def documentation(kind: Any) -> dict[str, str]:
    """The docstring below each field of a declared class, by the field's name."""
    return {
        entry.arg_name: (entry.description or "").replace("%", "%%")
        for base in kind.__mro__
        if dataclasses.is_dataclass(base)
        for entry in docstring_parser.parse_from_object(base).params
    }


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], bool]]:
    """Each setting of a declared class and of its sections: dotted name, field, whether it holds text."""
    types = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(item.default_factory):
            yield from _fields(item.default_factory, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, types[item.name] in (str, str | None)


_FIELDS = [*_fields(RunConfig)]
SETTINGS = {name: item for name, item, _ in _FIELDS}
"""The settings of a run by their dotted names."""
_ARCHITECTURE = [f"architecture.{item.name}" for item in dataclasses.fields(ModelConfig)]
FLAGS = [*(name for name in SETTINGS if name != "recipe"), *_ARCHITECTURE]
"""Those that are flags. --config sets the recipe's name."""
FLAG_NAMES = [f"--{name}" for name in FLAGS]
TEXTS = {name for name, _, is_text in _FIELDS if is_text}
"""Those that hold text as it is given; the others are read as YAML."""


def _known(recipe: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The settings of a recipe by their dotted names. UserError for an unknown one."""
    values = _by_dotted_name(recipe)
    for name in values:
        if name not in SETTINGS:
            known = shown(name, plain=True)
            hint = suggestion(known, FLAG_NAMES).replace("--", "")
            raise UserError(f"{known}: unknown key in {where}{hint}")
    return values


def _by_dotted_name(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The settings in a recipe's mapping by their dotted names, as they are in SETTINGS."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in SETTINGS:
            flat |= _by_dotted_name(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """What _by_dotted_name was made of."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise UserError(f"{section}: {shown(inner)} is not a mapping")
        inner[last] = value
    return nested


@functools.cache
def _build_parser() -> CommandParser:
    parser = CommandParser(
        usage="deepspeed --module pretrain.main [--config RECIPE] [--FIELD VALUE ...]",
        allow_abbrev=False,
        description="Pretrain a decoder with any head count per layer. Recipes: "
        + ", ".join(recipe_names())
        + ". The defaults below are those of a recipe that leaves the field out. They are not the default "
        f"run's: its recipe, {DEFAULT_RECIPE}, sets some of them, and --print_config shows what it uses.",
    )
    parser.other_names = OTHER_NAMES
    parser.add_argument(
        "--config",
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
        default="ds_configs/zero2.json",
        help="DeepSpeed configuration: a file, or the name of one in ds_configs, such as zero2.",
    )
    parser.add_argument(
        "--plot_lr", metavar="FILE", help="Draw every group's learning rate over the run into FILE, and stop."
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # passed by the launcher; ignored
    helps = documentation(RunConfig)
    for section in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(section.default_factory):
            of_section = documentation(section.default_factory).items()
            helps |= {f"{section.name}.{name}": text for name, text in of_section}
    for name in FLAGS:
        help = argparse.SUPPRESS
        if name in SETTINGS:
            made = SETTINGS[name].default_factory
            default = SETTINGS[name].default if made is dataclasses.MISSING else made()
            help = f"{helps[name]} (default: {default})"
        parser.add_argument(f"--{name}", metavar="VALUE", help=help)
    return parser


# ---------------------------------------------------------------------- files


def find_ds_config(name: str) -> str:
    """Path of a ds_config that was given as *name*: from the working directory, else from this project's
    root, else the one of that name that comes with it, such as ds_configs/zero2.json or zero2."""
    own = DS_CONFIGS / f"{name.removeprefix('ds_configs/').removesuffix('.json')}.json"
    return next((str(path) for path in (Path(name), ROOT / name, own) if _is_file(path)), name)


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


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises UserError for bad arguments, as for every other bad input."""

    other_names: Mapping[str, str] = {"version": OTHER_NAMES["version"]}
    """What to give in place of flags that other programs have; see pretrain.config.names."""
    may_be_empty: Container[str] = ()
    """Arguments whose value may be an empty text."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The values of an argument, as argparse reads them; empty texts, and bytes that are no text, are
        refused."""
        name = max(action.option_strings, key=len, default=action.dest)
        for text in arg_strings if action.nargs not in (argparse.PARSER, argparse.REMAINDER) else ():
            if not text.strip() and action.dest not in self.may_be_empty:
                raise UserError(f"{name}: {text!r} is empty; give a value, or leave it out")
            if text == "--":  # argparse would leave it out
                raise UserError(f"{name}: '--' is no value; give one, or leave it out")
            if not text.isprintable() and text != text.encode(errors="ignore").decode():
                raise UserError(f"{name}: {shown(text)} is not UTF-8 text; give a name that is")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        unknown = "unrecognized arguments: "
        if message.startswith(unknown + "-"):
            flag = message.removeprefix(unknown).split()[0].partition("=")[0]
            if having := [name for name, parser in self._commands().items() if flag in parser._flags()]:
                message = f"{flag}: not a flag of this command, but of {' and '.join(map(repr, having))}"
            else:
                message = f"{flag}: unknown flag{suggestion(flag, self._flags(), self.other_names)}"
        elif message.startswith(unknown):
            given = message.removeprefix(unknown)
            message = f"{shown(given, plain=bool(given.strip()))}: not expected here"
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
