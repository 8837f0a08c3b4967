"""Where settings come from, and how several sources become one RunConfig.

A recipe, a study file, flags and ``recipe(…)`` of Python spell a setting in different ways: nested or with
dots, ``architecture.heads`` or ``heads``, a list or text. ``flatten`` turns each source into the same form,
a mapping from a setting's dotted name to its value, and rejects two spellings of one setting in one source.
``Recipe.merge`` then lets the later, more specific source win. What a value may look like is declared with
its field in run_config.py. Nothing heavy is imported here.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from model.config import ModelConfig
from model.declared import from_dict, to_dict
from model.errors import UserError, quote, suggest
from model.presets import preset_names
from pretrain.config.flag_aliases import suggest_flag
from pretrain.config.run_config import DEFAULT_RECIPE, NUM_LAYERS, RunConfig
from pretrain.utils.parsing import QUOTE_COMMAS, key_text, plain_key, read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "pretrain" / "recipes"
DS_CONFIGS = ROOT / "pretrain" / "ds_configs"
"""In the repository a link to ds_configs/."""


# ---------------------------------------------------------------------- names


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each setting of a declared class and of its sections: dotted name, field, type."""
    types = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(item.default_factory):
            yield from _fields(item.default_factory, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, types[item.name]


_FIELDS = [*_fields(RunConfig)]
SETTINGS = {name: item for name, item, _ in _FIELDS}
"""The settings of a run by their dotted names."""
SECTIONS = {name.rpartition(".")[0] for name in SETTINGS if "." in name} | {"architecture"}
"""Settings that are mappings of other settings."""
_MODEL_FIELDS = [*(item.name for item in dataclasses.fields(ModelConfig)), NUM_LAYERS]
FLAGS = [
    *(name for name in SETTINGS if name != "recipe"),
    *(f"architecture.{name}" for name in _MODEL_FIELDS),
]
"""Those that are flags. --config sets the recipe's name."""
FLAG_NAMES = [f"--{name}" for name in FLAGS]
TEXTS = {name: kind == str | None for name, _, kind in _FIELDS if kind in (str, str | None)}
"""Those whose flag is text as it is given, and whether null unsets it; other flags are read as YAML."""
_SAME = {"architecture.heads": "heads"}
"""Second names of a setting."""
_KNOWN = {"recipe", *FLAGS} - {"architecture"}
_SUGGESTED = [f"--{name}" for name in FLAGS if name not in _SAME]


# ---------------------------------------------------------------------- one form for every source


def flatten(values: Mapping[Any, Any], where: str = "") -> dict[str, Any]:
    """The settings of one source by their dotted names; a section that is empty or null sets nothing.

    Args:
        values: nested, with dotted names, or both; a section may be an object such as ``run.optimizer``.
        where: names the source in messages, such as "the flags", where it has a name.

    Raises:
        UserError: an unknown setting (with the closest), a section that is no mapping, a value that YAML does
            not have, a setting given twice.
    """
    flat: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    source = f" in {where}" if where else ""
    for name, spelling, value in _settings(values, source):
        if (first := spelled.setdefault(name, spelling)) != spelling:
            raise UserError(f"{name}: given twice{source}, as {first} and as {spelling}; keep one")
        flat[name] = plain_value(value, name)
    if flat.get("init_from") is not None:  # its model, unless the same source names another
        flat.setdefault("model", flat["init_from"])
    return flat


def _settings(
    values: Mapping[Any, Any], source: str, section: str = "", spelling: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Each setting's name, how it is spelled, and its value."""
    for key, value in values.items():
        name = f"{section}{key}"
        written = f"{spelling}{key}"
        if not isinstance(key, str):
            raise UserError(f"{quote(name, plain=True)}: not the name of a setting{source}{QUOTE_COMMAS}")
        if name in SECTIONS:
            if dataclasses.is_dataclass(value):
                value = to_dict(value)
            if not isinstance(value, Mapping | None):
                fields = f"its fields, or leave it out: {name}.{_first_field(name)} is one"
                raise UserError(f"{name}: {quote(value)} is not valid; give a mapping of {fields}")
            yield from _settings(value or {}, source, f"{name}.", f"{written}: ")
        elif name in _KNOWN:
            yield _SAME.get(name, name), written, value
        else:
            unknown = quote(name, plain=bool(name.strip()))
            hint = suggest_flag(unknown, _SUGGESTED).replace("--", "")
            if "ds_config" in (unknown, *hint.split()):
                hint = "; it is a flag of the command, --ds_config"
            raise UserError(f"{unknown}: unknown key{source}{hint}")


def _first_field(section: str) -> str:
    return next(name for name in FLAGS if name.startswith(f"{section}.")).rpartition(".")[2]


def plain_value(value: Any, name: str) -> Any:
    """*value* as YAML would give it: paths as text, numpy's and torch's numbers and arrays as numbers and
    lists, declared objects as mappings.

    Raises:
        UserError: a value of another type, or a mapping with two keys that are one, such as 100 and "100"; it
            names the setting.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        keys = [plain_key(plain_value(key, name)) for key in value]
        if twice := [text for text, count in Counter(map(key_text, keys)).items() if count > 1]:
            raise UserError(f"{name}: {quote(twice[0], plain=True)} is given twice; keep one")
        inner = (plain_value(each, f"{name}.{quote(key, plain=True)}") for key, each in value.items())
        return dict(zip(keys, inner, strict=True))
    if isinstance(value, list | tuple):
        return [plain_value(item, name) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):  # numpy's and torch's
        return plain_value(value.tolist(), name)
    raise UserError(
        f"{name}: {quote(value)} of type {type(value).__name__} is not valid; give a number, text, true, "
        "false, a list or a mapping"
    )


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What ``flatten`` was made of, with a mapping for each section."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, field = name.rpartition(".")
        inner = result.setdefault(section, {}) if section else result
        inner[field] = value
    return result


@dataclass(frozen=True)
class Recipe:
    """The settings of a recipe, by dotted name."""

    values: Mapping[str, Any]
    is_default: bool
    """Whether none was named. It then only trains a model of a file or of a run's folder, which says
    everything about itself."""

    def merge(self, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's settings and those of *sources*, results of ``flatten``; later ones win."""
        chosen: dict[str, Any] = {}
        for source in sources:
            chosen |= source
        values = dict(self.values)
        if self.is_default and chosen.get("model") not in (None, *preset_names()):
            values = {name: value for name, value in values.items() if not name.startswith("architecture.")}
        if self.is_default and chosen.get("task") == "classification":
            values.pop("architecture.z_loss", None)  # of language models
        return values | chosen


def load_recipe(name: str | Path | None, what: str = "config") -> Recipe:
    """The recipe of that name or file; None: the default recipe.

    Args:
        what: begins the messages about its file.

    Raises:
        UserError: there is none, or it has an unknown setting or one given twice.
    """
    given = str(name or DEFAULT_RECIPE)
    path = find_recipe(given, what)
    values = flatten(read_recipe(path, what), given)
    return Recipe({"recipe": path.stem} | values, name is None)


def make_run(settings: Mapping[str, Any]) -> RunConfig:
    """The RunConfig of settings by their dotted names.

    Raises:
        UserError: a value that is not valid.
    """
    return from_dict(RunConfig, nest(settings))


def load_run_config(path: str | Path) -> RunConfig:
    """Read the config.yaml of a run folder.

    Raises:
        UserError: the file is missing or does not hold a RunConfig.
    """
    try:
        return make_run(load_recipe(str(path)).values)
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from None


def diff_settings(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two runs differ, by dotted name, with the value of each; None where only the
    other has it."""
    if one == other:
        return {}
    first, second = (flatten(to_dict(run)) for run in (one, other))
    return {
        name: (first.get(name), second.get(name))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    }


# ---------------------------------------------------------------------- files


def find_ds_config(name: str | Path) -> str:
    """Path of a ds_config that was given as *name*: from the working directory, else from this project's
    root, else the one of that name that comes with it, such as ds_configs/zero2.json or zero2."""
    name = str(name)
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
            f"{what}: no recipe or file {quote(name_or_path)}; recipes are {', '.join(recipe_names())}"
            + suggest(name_or_path, recipe_names())
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
