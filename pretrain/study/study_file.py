"""Study: which runs a study file asks for. See docs/studies.md for the format."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from model.errors import UserError, closest, shown
from pretrain.config.command_line import find_recipe, parse_command_line, read_recipe
from pretrain.config.run_config import DEFAULT_RECIPE, RunConfig, is_folder_name
from pretrain.study.contrasts import Contrast, full_name, parse_contrasts
from pretrain.utils.parsing import parse_yaml, read_text, shown_json

STUDIES = Path(__file__).resolve().parents[1] / "studies"
MEASURES = ("val_loss", "val_bpb", "val_accuracy", "train_loss")
MOST_SEEDS = 1000
KEYS = (
    "title", "recipe", "settings", "seeds", "baseline", "variants", "comparisons", "contrasts", "ds_config",
    "measure", "last_validations", "effect", "machine", "hours",
)  # fmt: skip
COMPARISON_KEYS = ("recipe", "settings", "baseline", "variants")
AGAINST = "against"
"""Key of a variant: another variant of the comparison, in place of its baseline."""
SEED_SHIFT = "seed_shift"
"""Key of a variant: its runs take seed + so much. Their pairs have nothing in common, as a check on the intervals."""
OF_A_STUDY = {
    "name": "a study names its runs itself",
    "runs_dir": "the runs of a study are in its folder; give --out",
    "seed": "give the study's seeds",
    "resume": "a study continues its runs",
    "recipe": "give recipe beside settings, not in them",
}
NOT_THE_RUN = {"name", "runs_dir", "resume", "recipe", "data_root", "threads", "logging", "interruption"}
"""Fields that do not change what a run computes, or (threads) only its rounding."""


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: settings that are run with every seed."""

    name: str
    settings: dict[str, Any]
    """Fields of RunConfig: the recipe's, with those of the study, the comparison and the variant in place."""
    seed_shift: int = 0
    against: str | None = None
    """The variant that it is compared with; None: the comparison's baseline."""


@dataclass(frozen=True)
class Comparison:
    """Variants that are compared with one baseline."""

    name: str
    """Empty in a study of one comparison."""
    variants: tuple[Variant, ...]
    baseline: str
    """The name of one of the variants."""

    def baseline_of(self, variant: str) -> str:
        """The name of the variant that *variant* is compared with; its own if with none."""
        found = next(each for each in self.variants if each.name == variant)
        return variant if variant == self.baseline else found.against or self.baseline


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    comparison: str
    variant: str
    seed: int
    """The study's seed, which pairs it with the other variants' runs; ``run.seed`` is what it trains with."""
    run: RunConfig

    @property
    def name(self) -> str:
        """Name of the run's folder, in the study's folder."""
        return self.run.run_name


@dataclass(frozen=True)
class Study:
    """What a study file asks for."""

    name: str
    title: str
    comparisons: tuple[Comparison, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    """Seed by seed: after an interruption whole pairs are there."""
    contrasts: tuple[Contrast, ...] = ()
    """What is compared beside the differences from baselines."""
    ds_config: str = "ds_configs/zero2.json"
    measure: str = "val_loss"
    """What is compared: a key of metrics.jsonl."""
    last_validations: int = 1
    """The result of a run is the mean of so many last values."""
    effect: float | None = None
    """Smallest difference of ``measure`` that the study is meant to see."""
    machine: str = ""
    """What its size was chosen for, in words."""
    hours: float | None = None
    """The budget there."""
    text: str = ""
    """The file's contents."""

    def comparison(self, name: str) -> Comparison:
        """The comparison of that name."""
        return next(found for found in self.comparisons if found.name == name)


def study_names() -> list[str]:
    """The studies that come with the project."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def find_study(name: str | Path) -> Path:
    """The file of that name or path.

    Raises:
        UserError: there is none; it names the closest.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (STUDIES / f"{name}.yaml").is_file():
        return STUDIES / f"{name}.yaml"
    raise UserError(
        f"study: no file or study {shown(str(name))}; studies are {', '.join(study_names())}"
        + closest(str(name), study_names())
    )


def read_study(path: Path, out: Path | None = None, name: str | None = None) -> Study:
    """Read and check a study file, and the RunConfig of each of its runs.

    Args:
        out: the study's folder; ``runs/NAME`` by default.
        name: the study's name; the file's by default.

    Raises:
        UserError: it names the file's field, its value and what would be valid; nothing has been run or written.
    """
    name = path.stem if name is None else name
    return parse_study(read_text(path, "study"), name, out or Path("runs") / name, f"study: {path}")


def parse_study(text: str, name: str, out: Path, where: str = "study") -> Study:
    """As read_study, of a file's contents; messages about its YAML begin with *where*."""
    values = parse_yaml(text, where)
    if not isinstance(values, dict):
        raise UserError(f"{where} holds {shown_json(values)}; it must be a mapping")
    _check_keys(values, KEYS, "")
    if not is_folder_name(name):
        raise UserError(f"study: {shown(name)} is not the name of a folder; call the file otherwise")
    comparisons = tuple(_comparisons(values))
    seeds = _seeds(values.get("seeds"))
    study = Study(
        name=name,
        title=_of_type(values, "title", str, name),
        comparisons=comparisons,
        seeds=seeds,
        runs=tuple(_runs(comparisons, seeds, out)),
        contrasts=tuple(parse_contrasts(values.get("contrasts"), _variant_names(comparisons))),
        ds_config=_of_type(values, "ds_config", str, "ds_configs/zero2.json"),
        measure=_of_type(values, "measure", str, "val_loss"),
        last_validations=_of_type(values, "last_validations", int, 1),
        effect=_positive(values, "effect"),
        machine=_of_type(values, "machine", str, ""),
        hours=_positive(values, "hours"),
        text=text,
    )
    if study.measure not in MEASURES:
        _refuse("measure", study.measure, f"give one of {', '.join(MEASURES)}")
    if study.last_validations < 1:
        _refuse("last_validations", study.last_validations, "give a positive number")
    _refuse_equal_folders(study)
    _refuse_equal_runs(study)
    for planned in study.runs:
        _refuse_unmeasured(study, planned)
    return study


def _variant_names(comparisons: tuple[Comparison, ...]) -> list[tuple[str, str]]:
    return [(comparison.name, variant.name) for comparison in comparisons for variant in comparison.variants]


def _comparisons(values: Mapping[str, Any]) -> Iterator[Comparison]:
    if "comparisons" not in values:
        yield _comparison("", values)
        return
    for key in ("variants", "baseline"):
        if key in values:
            raise UserError(f"study: {key} stands beside comparisons; give it in each of them")
    if not isinstance(values["comparisons"], dict) or not values["comparisons"]:
        _refuse("comparisons", values["comparisons"], "give a mapping of names to comparisons")
    for name, own in values["comparisons"].items():
        where = f"comparisons.{_name(name, 'comparisons')}"
        if not isinstance(own, dict):
            _refuse(where, own, "give a mapping with variants and baseline")
        _check_keys(own, COMPARISON_KEYS, f"{where}.")
        shared = _mapping(values, "settings", "settings")
        merged = {"recipe": values.get("recipe", DEFAULT_RECIPE)} | own
        merged["settings"] = merge(shared, _mapping(own, "settings", f"{where}.settings"))
        yield _comparison(str(name), merged)


def _comparison(name: str, values: Mapping[str, Any]) -> Comparison:
    where = f"comparisons.{name}." if name else ""
    variants = values.get("variants")
    if not isinstance(variants, dict) or not variants:
        _refuse(f"{where}variants", variants, "give a mapping of names to settings")
    baseline = values.get("baseline")
    if baseline is None or str(baseline) not in map(str, variants):
        _refuse(
            f"{where}baseline",
            baseline,
            f"it must be one of the variants: {', '.join(map(str, variants))}"
            + closest(str(baseline), map(str, variants)),
        )
    recipe = values.get("recipe", DEFAULT_RECIPE)
    settings = merge(_recipe(recipe, f"{where}recipe"), _mapping(values, "settings", f"{where}settings"))
    found = []
    for variant, own in variants.items():
        at = f"{where}variants.{_name(variant, f'{where}variants')}"
        own = {} if own is None else own
        if not isinstance(own, dict):
            _refuse(at, own, "give a mapping of RunConfig fields, such as {heads: 8x4}")
        shift = own.get(SEED_SHIFT, 0)
        if type(shift) is not int or shift < 0:
            _refuse(f"{at}.{SEED_SHIFT}", shift, "give a whole number from 0")
        against = own.get(AGAINST)
        if against is not None and str(against) not in map(str, variants):
            _refuse(
                f"{at}.{AGAINST}", against, f"it must be one of the variants: {', '.join(map(str, variants))}"
            )
        if against is not None and str(against) == str(variant):
            _refuse(f"{at}.{AGAINST}", against, "a variant cannot be compared with itself; leave it out")
        if against is not None and str(variant) == str(baseline):
            _refuse(f"{at}.{AGAINST}", against, "the baseline is compared with none; leave it out")
        own = {key: value for key, value in own.items() if key not in (SEED_SHIFT, AGAINST)}
        for key in {*own, *_mapping(values, "settings", "settings")} & OF_A_STUDY.keys():
            raise UserError(f"study: {at}.{key}: not a setting of a study's runs: {OF_A_STUDY[key]}")
        found.append(Variant(str(variant), merge(settings, own), shift, against and str(against)))
    return Comparison(name, tuple(found), str(baseline))


def _recipe(name: Any, where: str) -> dict[str, Any]:
    """The recipe's fields, with its own name among them."""
    path = find_recipe(str(name), f"study: {where}")
    return {"recipe": path.stem} | read_recipe(path, f"study: {where}")


def merge(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """*settings* with the fields of *own* in their place; sections such as optimizer are merged field by field."""
    merged = dict(settings)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both and key in _SECTIONS else value
    return merged


_SECTIONS = {
    field.name for field in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(field.default_factory)
} | {"architecture"}


_DESCRIBE_A_MODEL = ("model", "heads", "architecture")


def _seeds(value: Any) -> tuple[int, ...]:
    """Seeds from a list, or 1 … N from a number."""
    if type(value) is int and 1 <= value <= MOST_SEEDS:
        return tuple(range(1, value + 1))
    if isinstance(value, list) and value and all(type(seed) is int and seed >= 0 for seed in value):
        if len(set(value)) == len(value) <= MOST_SEEDS:
            return tuple(value)
        _refuse("seeds", value, f"give each once, and at most {MOST_SEEDS}")
    _refuse("seeds", value, "give a list such as [1, 2, 3], or how many: 3")


def _runs(comparisons: tuple[Comparison, ...], seeds: tuple[int, ...], out: Path) -> Iterator[PlannedRun]:
    configs = {
        (comparison.name, variant.name): _run_config(comparison, variant)
        for comparison in comparisons
        for variant in comparison.variants
    }
    for seed in seeds:
        for comparison in comparisons:
            for variant in comparison.variants:
                parts = [comparison.name] * bool(comparison.name) + [variant.name, f"s{seed}"]
                run = dataclasses.replace(
                    configs[comparison.name, variant.name],
                    seed=seed + variant.seed_shift,
                    name="-".join(parts),
                    runs_dir=str(out),
                )
                yield PlannedRun(comparison.name, variant.name, seed, run)


def _run_config(comparison: Comparison, variant: Variant) -> RunConfig:
    """The variant's RunConfig, checked as main.py checks it, with the model that it describes."""
    where = full_name((comparison.name, variant.name))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variant.yaml"
        path.write_text(yaml.safe_dump(variant.settings, sort_keys=False), encoding="utf-8")
        try:
            run = parse_command_line(["--config", str(path)]).run
            run.build_model_config()
        except UserError as error:
            raise UserError(f"study: variant {where}: {error}".replace(str(path), "it")) from None
    return run


def _refuse_unmeasured(study: Study, planned: PlannedRun) -> None:
    """Refuse a study whose runs would train to their end without the figure that is compared."""
    run, measure = planned.run, study.measure
    where = full_name((planned.comparison, planned.variant))
    classifier = run.task == "classification"
    if (measure == "val_accuracy" and not classifier) or (measure == "val_bpb" and classifier):
        what = "a classifier" if classifier else "a language model"
        _refuse("measure", measure, f"variant {where} is {what}, in which it is not measured; give val_loss")
    values = (
        run.steps
        if measure == "train_loss"
        else run.validation.every and -(-run.steps // run.validation.every)
    )
    if not values:
        _refuse("measure", measure, f"variant {where} has validation.every 0; give a number of steps there")
    if study.last_validations > values:
        times = f"{values:,} time{'s' * (values != 1)}"
        _refuse(
            "last_validations", study.last_validations, f"variant {where} measures {measure} {times} in all"
        )


def _refuse_equal_folders(study: Study) -> None:
    """Refuse two runs whose folders would have one name, such as those of a: b-c and a-b: c."""
    seen: dict[str, str] = {}
    for planned in study.runs:
        where = f"variant {planned.variant}" + f" of comparison {planned.comparison}" * bool(
            planned.comparison
        )
        if planned.name in seen:
            raise UserError(
                f"study: {seen[planned.name]} and {where} would share the folder {planned.name}; call one otherwise"
            )
        seen[planned.name] = where


def _refuse_equal_runs(study: Study) -> None:
    """Refuse two variants of a comparison that are the same run under two names."""
    first = [planned for planned in study.runs if planned.seed == study.seeds[0]]
    for comparison in study.comparisons:
        seen: dict[str, str] = {}
        for planned in first:
            if planned.comparison != comparison.name:
                continue
            # The same model can be described in several ways.
            settings = differing_fields(planned.run, RunConfig())
            settings = {k: v for k, v in settings.items() if k.split(".")[0] not in _DESCRIBE_A_MODEL}
            key = f"{settings} {planned.run.seed} {planned.run.build_model_config()}"
            if key in seen:
                raise UserError(
                    f"study: variants {seen[key]} and {planned.variant} are the same run; leave one out, or give "
                    f"one {SEED_SHIFT}: 1000 to compare equal runs of other seeds"
                )
            seen[key] = planned.variant


def differing_fields(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two runs differ, nested ones with dots; without those that do not change what is computed."""
    values = [
        {key: value for key, value in run.to_dict().items() if key not in NOT_THE_RUN} for run in (one, other)
    ]
    flat = [dict(_flat(value)) for value in values]
    return {
        key: (flat[0].get(key), flat[1].get(key))
        for key in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(key) != flat[1].get(key)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_keys(values: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in valid:
            hint = closest(str(key), valid) or f"; valid keys are {', '.join(valid)}"
            raise UserError(f"study: {where}{shown(key, plain=True)}: unknown key{hint}")


def _mapping(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        _refuse(where, value, "give a mapping of RunConfig fields")
    return value


def _name(name: Any, where: str) -> str:
    if not is_folder_name(str(name)) or " " in str(name):
        _refuse(where, name, "give names that can be part of a folder's, without spaces")
    return str(name)


def _of_type(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = values.get(key, default)
    if type(value) is not kind:
        _refuse(key, value, f"give {'text' if kind is str else 'a whole number'}")
    return value


def _positive(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    if value is not None and (type(value) not in (int, float) or value <= 0):
        _refuse(key, value, "give a number above 0")
    return value


def _refuse(key: str, value: Any, valid: str) -> NoReturn:
    raise UserError(f"study: {key}: {shown_json(value)} is not valid; {valid}")
