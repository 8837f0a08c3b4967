"""The study file as it is written: its keys with their types, ``extends``, and its JSON schema."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from model.declared import NonNegativeInt, PositiveFloat, PositiveInt, declared
from model.errors import UserError, quote, suggest
from model.heads import normalize_heads
from pretrain.config.command_line import documentation
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import nest
from pretrain.study.settings import Settings, Text, read_settings, refuse
from pretrain.utils.parsing import QUOTE_COMMAS, parse_yaml, read_text

STUDIES = Path(__file__).resolve().parents[1] / "studies"
MOST_SEEDS = 1000
OWN = ("title", "question", "predictions", "status", "hours")
"""Keys that a file does not take from the one that it extends."""
BY_NAME = ("vary", "variants", "contrasts", "predict", "tune")
"""Keys whose entries replace those of the same name in the file that is extended."""


def _seeds(value: Any) -> Any:
    """Seeds 1 … N for a number."""
    if type(value) is int and 1 <= value <= MOST_SEEDS:
        return list(range(1, value + 1))
    if not isinstance(value, list) or not 0 < len(set(map(str, value))) == len(value) <= MOST_SEEDS:
        raise UserError(
            f"seeds: {quote(value)} is not valid; give a list such as [1, 2, 3], each once, or how many: 3 "
            f"(at most {MOST_SEEDS:,})"
        )
    return value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _named(value: Any) -> Any:
    """Formulas in a list are their own names."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return {each: each for each in value}
    return value


def _either(read: Any, also: Any) -> BeforeValidator:
    """A validator for a field with an alternative spelling, which the JSON schema also lists."""
    return BeforeValidator(read, json_schema_input_type=also)


Seeds = Annotated[list[NonNegativeInt], _either(_seeds, PositiveInt | list[NonNegativeInt])]
Texts = Annotated[list[Text], _either(_as_list, str | list[str])]


def _check_status(value: str) -> str:
    if not re.fullmatch(r"open|confirmed|refuted|superseded by \S+", value):
        valid = "open, confirmed, refuted, or superseded by STUDY"
        raise UserError(f"status: {quote(value)} is not valid; give {valid}")
    return value


Tune = Annotated[dict[str, list[Any]], Field(max_length=1)]
"""One setting, and the values that are tried."""


Factor = Annotated[
    Annotated[list[Any], Tag("list")] | Annotated[dict[Text, Settings | None], Tag("levels")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "levels"),
]
"""Values of a setting, or named levels."""


@declared()
class LevelFile:
    """What a variant or a named level has besides settings."""

    recipe: Text | None = None
    """In place of the study's."""
    seed_shift: NonNegativeInt = 0
    """Its runs train with seed + N, so that their pairs have nothing in common: a check on the intervals."""
    against: Text | None = None
    """The level of the same factor that it is compared with, in place of the baseline."""
    tune: Tune | None = None
    """In place of the study's."""


@declared()
class StudyFile:
    """A study: which runs are trained, and what is compared."""

    seeds: Seeds
    """A list, or how many: 3 for 1, 2, 3. Runs of one seed are paired."""
    extends: Text | None = None
    """A study's name or file that this one changes: settings are merged, entries of vary, variants,
    contrasts, predict and tune are replaced by name, other keys as a whole; null takes out a key or such an
    entry of that file, but no setting."""
    title: Text | None = None
    question: Text | None = None
    """What the study asks, in a sentence or two."""
    predictions: Texts | None = None
    """What is expected, written down before the runs. The first run records them with date and commit."""
    status: Annotated[str, AfterValidator(_check_status)] = "open"
    """open, confirmed, refuted, or superseded by STUDY."""
    recipe: Text | None = None
    """A name from pretrain/recipes or a file; without one, the default recipe."""
    recipes: dict[Text, Settings] | None = None
    """Recipes by the name that recipe gives, in place of files. A study's folder and its record have those of
    its runs."""
    settings: Settings | None = None
    """Of all runs, as in a recipe."""
    vary: Annotated[dict[Text, Factor], Field(min_length=1)] | None = None
    """Factors: a setting, such as optimizer.learning_rate, heads[0] or heads[1:3], with a list of values; or
    your own name with levels, each a name with settings."""
    method: Literal["grid", "orthogonal", "fractional"] = "grid"
    """Which combinations of vary are trained: all of them; or so many that every pair (orthogonal) or every
    three (fractional) of factors has every combination of levels equally often."""
    runs: PositiveInt | None = None
    """How many combinations, with method orthogonal or fractional."""
    variants: Annotated[dict[Text, Settings | None], Field(min_length=1)] | None = None
    """Settings by name, for what is no grid. With vary, every variant is trained at every combination; one
    that is called LEVEL.NAME, at that level alone."""
    baseline: Texts | None = None
    """The variant or level that the others are compared with, paired by seed; several, if levels have their
    own. Without one, the effects of all levels are estimated together."""
    contrasts: Annotated[dict[Text, Text], _either(_named, dict[str, str] | list[str])] | None = None
    """Formulas over variants and levels, by name or as a list: "ascending - descending"."""
    primary: list[Text] | None = None
    """Names of the contrasts that the study is made for, adjusted for their number (Holm); all, if left
    out."""
    predict: dict[Text, Annotated[str, _either(normalize_heads, str | int | list[int])]] | None = None
    """Head schedules whose loss is predicted, by name, where heads are varied layer by layer."""
    tune: Tune | None = None
    """A setting of which every variant takes its own best value, found with pilot_seeds."""
    pilot_seeds: Seeds | None = None
    """Of the runs that tune; none of the study's own."""
    ds_config: Text = "ds_configs/zero2.json"
    measure: Literal["val_loss", "val_bpb", "val_accuracy", "train_loss"] = "val_loss"
    """What is compared."""
    last_validations: PositiveInt = 1
    """A run's result is the mean of so many last values."""
    effect: PositiveFloat | None = None
    """The smallest difference that the study is designed to detect."""
    machine: Text = ""
    """The reason for its size, in words."""
    hours: PositiveFloat | None = None
    """The time that it takes there."""


def study_names() -> list[str]:
    """The studies included with the project."""
    return sorted(path.stem for path in STUDIES.glob("[!_]*.yaml"))


def find_study(name: str | Path, near: Path | None = None) -> Path:
    """The file of that name or path; a path, or the name of no study included, also from the folder *near*.

    Raises:
        UserError: there is none; it names the closest.
    """
    beside = [near / name, near / f"{name}.yaml"] if near else []
    for path in (Path(name), *beside[:1], STUDIES / f"{name}.yaml", *beside[1:]):
        if path.is_file():
            return path
    valid = suggest(str(name), study_names()) or "; `head-schedules study list` prints all studies"
    raise UserError(f"study: no file or study {quote(str(name))}{valid}")


def _refuse_commas(given: Any, where: str) -> None:
    """Reject {heads: 2,4,8}, which YAML reads as one head count and two keys without values."""
    for key, value in given.items() if isinstance(given, dict) else ():
        if value is None and str(key).isdigit():
            raise UserError(f"{where}: {key}: not the name of a setting{QUOTE_COMMAS}")
        _refuse_commas(value, f"{where}: {key}")


def resolve(text: str, where: str, near: Path | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's keys, those of the files that it extends included.

    Args:
        where: begins the messages about its YAML.
        near: the folder of the file.
        seen: the files that led to this one.

    Raises:
        UserError: no mapping, a file that is missing, or one that extends itself.
    """
    own = parse_yaml(text, where)
    if not isinstance(own, dict):
        raise UserError(f"{where} is not a mapping of a study's keys, such as seeds and variants")
    _refuse_commas(own, where)
    if own.get("extends") is None:
        return own
    path = find_study(str(own.pop("extends")), near).resolve()
    if path in seen:
        refuse("extends", str(path), "it extends itself")
    parent = resolve(read_text(path, "study"), f"study: {path}", path.parent, (*seen, path))
    if isinstance(own.get("contrasts"), dict):  # replaced by name, also where the other file has a list
        parent["contrasts"] = _named(parent.get("contrasts"))
    merged = {key: value for key, value in parent.items() if key not in OWN} | own
    for key in BY_NAME:
        if isinstance(parent.get(key), dict) and isinstance(own.get(key), dict):
            out = {name for name, value in own[key].items() if value is None}
            for name in out - parent[key].keys():
                valid = f"null takes out one of {', '.join(map(str, parent[key]))}"
                refuse(f"{key}.{name}", None, f"{valid}{suggest(str(name), map(str, parent[key]))}")
            merged[key] = {name: each for name, each in (parent[key] | own[key]).items() if name not in out}
    if all(isinstance(each.get("settings"), dict) for each in (parent, own)):
        both = (read_settings(each["settings"], "settings") for each in (parent, own))
        merged["settings"] = nest({name: value for each in both for name, value in each.items()})
    return {key: value for key, value in merged.items() if value is not None}


SPELLED_FREELY = ("heads", "lr_rules", "hooks", "growth")
"""Settings that the schema does not check: they may also be written as text."""


def schema() -> dict[str, Any]:
    """The JSON schema of a study file, for editors; settings have the fields of a recipe."""
    found = TypeAdapter(StudyFile).json_schema()
    run = TypeAdapter(RunConfig).json_schema()
    settings = run["properties"] | {key: {} for key in SPELLED_FREELY}
    level = TypeAdapter(LevelFile).json_schema()["properties"] | settings
    found["$defs"] = run["$defs"]
    for name, each in (("Settings", settings), ("Level", level)):
        checked = {"properties": each, "additionalProperties": False, "patternProperties": {r"\.": {}}}
        found["$defs"][name] = {"type": ["object", "null"]} | checked
    del found["required"]  # seeds may be those of the study that is extended
    texts = documentation(StudyFile)
    for item in fields(StudyFile):
        found["properties"][item.name]["description"] = " ".join(texts.get(item.name, "").split())
    found["properties"]["settings"]["anyOf"] = [{"$ref": "#/$defs/Settings"}]
    found["properties"]["variants"]["anyOf"][0]["additionalProperties"] = {"$ref": "#/$defs/Level"}
    of_factor = found["properties"]["vary"]["anyOf"][0]["additionalProperties"]["oneOf"]
    of_factor[1]["additionalProperties"] = {"$ref": "#/$defs/Level"}
    # null takes out what the study that is extended has.
    of_factor.append({"type": "null"})
    found["properties"]["contrasts"]["anyOf"][0]["additionalProperties"] = {"type": ["string", "null"]}
    return found
