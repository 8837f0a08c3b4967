"""Plans a study: factors × variants × seeds become runs, and every run is compared with what its name
says."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.declared import from_dict, to_dict
from model.errors import UserError, quote
from model.heads import parse_heads
from model.schedules import SCHEDULES
from pretrain.config.run_config import DEFAULT_RECIPE, is_folder_name
from pretrain.config.sources import Recipe, diff_settings, flatten, load_recipe, make_run, nest
from pretrain.study.arrays import MOST_RUNS, compute_strength, full_factorial, orthogonal_array
from pretrain.study.file import LevelFile, StudyFile, resolve
from pretrain.study.formulas import match_variants, read_contrasts
from pretrain.study.planned import SEEN, Design, Level, PlannedRun, Study, Variant, read_tune
from pretrain.study.settings import Settings, is_name_part, read_labels, read_settings, refuse
from pretrain.study.tuning import PILOT, TUNED_FILE, Tuned, pilot_name, read_tuned
from pretrain.utils.parsing import format_yaml, read_text

OF_A_STUDY = {"name", "runs_dir", "seed", "resume", "recipe"}
"""Settings that the study sets itself."""
LAYERS = re.compile(r"(?:architecture\.)?(\w+)\[(\d{1,4})(?::(\d{1,4}))?\]")
OPTIONS = {item.name for item in fields(LevelFile)}
ROUNDING = {"threads", "compile", "fused", "attention"}
NOT_THE_RUN = {"name", "runs_dir", "resume", "recipe", "data_root", "logging", "interruption"} | ROUNDING
NOT_THE_RUN |= {"checkpoint.mirror", "checkpoint.mirror_reserve"}
"""Settings, and sections, that do not change what a run computes, or only its rounding."""
NOT_COMPARED = NOT_THE_RUN - ROUNDING | {"model", "heads", "architecture"}
"""Settings that make two variants no different: the last three are in the model's own."""
VARIANT = "variant"
"""The name of the factor whose levels are the file's variants."""

Factors = dict[str, dict[str, Level]]
"""By name: what each level sets, by label."""


def read_study(path: Path, out: Path | None = None, name: str | None = None, **options: Any) -> Study:
    """Read a study file and plan its runs.

    Args:
        out: the study's folder; ``runs/NAME`` by default.
        name: the study's name; the file's by default.
        options: as for ``parse_study``.

    Raises:
        UserError: it names the file's key, its value and what would be valid; nothing has been run or
        written.
    """
    name = path.stem if name is None else name
    out = out or Path("runs") / name
    given: dict[str, Any] = {"where": f"study: {path}", "near": path.parent, "source": str(path)} | options
    try:
        return parse_study(read_text(path, "study"), name, out, **given)
    except UserError as error:
        if options.get("settings") or not str(error).startswith("study: ") or str(path) in str(error):
            raise
        raise UserError(f"study: {given['source']}{str(error).removeprefix('study')}") from None


def parse_study(
    text: str,
    name: str,
    out: Path,
    where: str = "study",
    near: Path | None = None,
    source: str = "",
    settings: Mapping[str, Any] | None = None,
    check_runs: bool = True,
    pilots: bool = False,
    tuned: Mapping[str, Tuned] | None = None,
) -> Study:
    """As read_study, of a file's contents.

    Args:
        where: begins the messages about its YAML.
        near: the folder of the file, for ``extends``.
        source: the name or file that it came from.
        settings: replace those of the file, in any spelling.
        check_runs: whether to check the settings of all runs now; else those of a run are checked where it is
            first used.
        pilots: whether its runs are pilots, of which several may be equal.
        tuned: what pilots chose; by default what is written in its folder.
    """
    flags = read_settings(settings, "settings")
    keys = resolve(text, where, near)
    if flags:
        keys["settings"] = nest(read_settings(keys.get("settings"), "settings") | flags)
    file = from_dict(StudyFile, keys, "study")
    if not is_folder_name(name):
        raise UserError(f"study: {quote(name)} is not the name of a folder; call the file otherwise")
    _check_keys(file)
    tuned = read_tuned(out) if tuned is None else tuned
    vary = {factor: _read_factor(factor, given) for factor, given in (file.vary or {}).items()}
    levels, made = _cross(file, vary)
    load = _Recipes(file.recipes or {})
    variants = {each.name: each for each in _make_variants(file, flags, tuned, made, load)}
    # A folder and a record hold what their runs were trained with, whatever becomes of the recipe's file.
    keys["recipes"] = load.contents
    file = replace(file, recipes=keys["recipes"])
    if file.baseline:
        variants = dict(_with_controls(variants, file.baseline, levels))
    runs = tuple(PlannedRun(variant, seed, out) for seed in file.seeds for variant in variants.values())
    design = None if file.baseline else _make_design(file, vary, levels, variants)
    rows = {each.name: each.levels for each in variants.values()}
    tuned = {name: tuned[name] for name, each in variants.items() if TUNED_FILE in each.parts}
    contrasts = tuple(read_contrasts(file.contrasts or {}, file.primary, levels, rows))
    for contrast in contrasts:
        if design and (contrast.order > 2 or (contrast.order == 2 and design.strength < 4)):
            valid = f"in this study {SEEN[design.strength]}; take method grid or more runs"
            refuse(f"contrasts.{contrast.name}", contrast.formula, valid)
    study = Study(
        name, out, file, variants, runs, levels, contrasts, format_yaml(keys), design, tuned, source, pilots
    )
    if study.tried and not file.pilot_seeds:
        raise UserError("study: pilot_seeds: missing; tune needs seeds that the study does not report")
    for variant_name, (setting, values) in study.tried.items():
        read_labels(f"tune.{setting}", values, 32)
        if setting in flags:
            raise UserError(f"settings.{setting}: the study tries several values of it (tune); leave it out")
        for part, level in variants[variant_name].parts.items():
            if part != TUNED_FILE and setting in level.settings:
                said = f"variant {variant_name}: {setting}"
                raise UserError(f"study: {said}: set by {part}, and tune tries values of it; leave one out")
    if file.pilot_seeds and not study.tried:
        refuse("pilot_seeds", file.pilot_seeds, "give tune, or leave them out")
    used = {each.seed + each.definition.options.seed_shift for each in runs}
    if shared := used & {*(file.pilot_seeds or ())}:
        refuse("pilot_seeds", file.pilot_seeds, f"runs of the study have seed {min(shared)}; give others")
    folders = {name: each.folder for name, each in variants.items()}
    _refuse_equal(file, folders, "it would share a folder with {}; rename one")
    for variant in variants.values() if check_runs else ():
        _check_variant(variant)
        _refuse_unmeasured(file, variant)
    if check_runs and not pilots:
        described = {name: _describe_runs(study, name) for name in variants}
        valid = "its runs are those of {}; vary a setting, or give seed_shift for other seeds"
        _refuse_equal(file, described, valid)
    return study


def build_pilot(study: Study) -> Study:
    """The study of the pilots of the variants of *study*, which has tune, in its folder."""
    file, variants = study.file, {}
    for name, (setting, values) in study.tried.items():
        variant = study.variants[name]
        recipe = variant.options.recipe or file.recipe
        for value in values:
            own = read_settings({setting: value}, "tune") | ({"recipe": recipe} if recipe else {})
            variants[pilot_name(variant.folder, value)] = variant.given | own
    kept = {
        key: getattr(file, key) for key in ("recipes", "ds_config", "measure", "last_validations", "machine")
    }
    keys = kept | {
        "title": f"Pilots: {study.title}",
        "seeds": file.pilot_seeds,
        "baseline": next(iter(variants)),
        "variants": variants,
    }
    pilot = parse_study(format_yaml(keys), f"{study.name}-{PILOT}", study.folder / PILOT, pilots=True)
    return replace(pilot, recorded=study.recorded, pilots_of=study)


def list_parts(study: Study) -> list[Study]:
    """The study of its pilots, if it has some, and the study."""
    return [*([build_pilot(study)] if study.tried else ()), study]


def reread(study: Study) -> Study:
    """The study with what pilots have chosen since it was read."""
    tuned = read_tuned(study.folder) | dict(study.tuned)
    given: dict[str, Any] = {"source": study.source, "tuned": tuned, "pilots": study.pilots}
    return replace(parse_study(study.text, study.name, study.folder, **given), recorded=study.recorded)


# ---------------------------------------------------------------------- the file


def _check_keys(file: StudyFile) -> None:
    """Reject keys that do not go together."""
    if file.variants and not file.baseline:
        raise UserError("study: baseline: missing; give the variant that the others are compared with")
    if file.vary is None and not file.variants:
        raise UserError("study: variants: missing; give variants and a baseline, or vary")
    if file.method != "grid" and (file.vary is None or file.runs is None):
        refuse("method", file.method, "it needs vary and runs, the number of combinations")
    if file.tune and not file.baseline:
        refuse("tune", file.tune, "without a baseline, vary the setting")
    if file.predict and file.baseline:
        refuse("predict", file.predict, "it needs the effects of levels, which a study with a baseline lacks")


def _read_factor(name: str, given: list[Any] | dict[str, Settings | None]) -> dict[str, Level]:
    where, layers = f"vary.{quote(name, plain=True)}", LAYERS.fullmatch(name)
    labels = read_labels(where, given)
    if isinstance(given, dict):
        return {each: _read_level(settings, f"{where}.{each}") for each, settings in given.items()}
    if not layers:
        settings = [read_settings({name: value}, "vary") for value in given]
        _refuse_own(settings[0], "vary")
        return dict(zip(labels, map(Level, settings), strict=True))
    first, last = int(layers[2]), int(layers[3] or int(layers[2]) + 1)
    if first >= last:
        refuse("vary", name, f"it names no layer; give {layers[1]}[{first}:{first + 1}], as in Python")
    values = [int(value) if isinstance(value, str) and value.isdigit() else value for value in given]
    elements = [{(layers[1], layer): value for layer in range(first, last)} for value in values]
    return {each: Level({}, values) for each, values in zip(labels, elements, strict=True)}


def _read_level(given: Settings | None, where: str) -> Level:
    """Settings, and the options next to them."""
    given = given or {}
    options = {key: value for key, value in given.items() if key in OPTIONS}
    settings = read_settings({key: value for key, value in given.items() if key not in OPTIONS}, where)
    _refuse_own(settings, where)
    from_dict(LevelFile, options, "study", where)
    return Level(settings, {}, options)


def _refuse_own(settings: Settings, where: str) -> None:
    for key in OF_A_STUDY & settings.keys():
        valid = "give it next to settings or in a variant" if key == "recipe" else "leave it out"
        raise UserError(f"study: {where}.{key}: not a setting of a study's runs; {valid}")


# ---------------------------------------------------------------------- combinations

Parts = dict[str, tuple[str, Level]]
"""By factor: the label of a level, and what it sets."""


def _cross(file: StudyFile, vary: Factors) -> tuple[dict[str, tuple[str, ...]], list[Parts]]:
    """The labels of each factor, and the levels of every variant: the combinations of *vary* that are
    trained, and at each of them the file's variants."""
    counts = [len(levels) for levels in vary.values()]
    combinations = math.prod(counts)
    if file.method == "grid":
        if file.runs not in (None, combinations) or combinations > MOST_RUNS:
            valid = f"method grid takes all {combinations:,} combinations; at most {MOST_RUNS:,} are possible"
            refuse("runs", file.runs, valid)
        array = full_factorial(counts).tolist()
    else:
        array = orthogonal_array(counts, file.runs or 0, 3 if file.method == "fractional" else 2).tolist()
    if not file.baseline:
        # In a random order what changes with time, such as the machine's load, falls on no level more than on
        # others, and a part of the runs can be analysed.
        array = random.Random(0).sample(array, len(array))
    labels = {name: tuple(levels) for name, levels in vary.items()}
    known = {each for of_factor in labels.values() for each in of_factor}
    cells = []
    for name, given in (file.variants or {}).items():
        level, _, own = name.rpartition(".")
        level, own = (level, own) if level in known else ("", name)
        if not is_name_part(own):
            refuse("variants", own, "give names that can be part of a folder's, without spaces")
        cells.append((level, own, _read_level(given, f"variants.{name}")))
    if cells:
        labels[VARIANT] = tuple(dict.fromkeys(name for _, name, _ in cells))
    made: list[Parts] = []
    for row in array:
        chosen = [labels[name][level] for name, level in zip(vary, row, strict=True)]
        parts: Parts = {name: (each, vary[name][each]) for name, each in zip(vary, chosen, strict=True)}
        here = [(name, level) for at, name, level in cells if not at or at in chosen]
        if len(dict(here)) < len(here):
            twice = next(name for name, _ in here if sum(name == other for other, _ in here) > 1)
            refuse("variants", twice, f"{'.'.join(chosen)} has two of that name; rename one")
        made += [parts | {VARIANT: cell} for cell in here] if cells else [parts]
    return labels, made


def _make_design(
    file: StudyFile, vary: Factors, labels: Mapping[str, tuple[str, ...]], variants: Mapping[str, Variant]
) -> Design:
    rows = {name: tuple(map(tuple.index, labels.values(), each.levels)) for name, each in variants.items()}
    counts = [len(each) for each in labels.values()]
    # Of all combinations any columns hold every one equally often; there is nothing to count.
    strength = 4 if file.method == "grid" else compute_strength(np.array(list(rows.values())), counts)
    given = (file.predict or {}).items()
    predict = {name: dict(_states(vary, heads, f"predict.{name}")) for name, heads in given}
    return Design(labels, rows, 4 if strength == len(counts) else strength, predict)


def _states(vary: Factors, heads: str, where: str) -> Iterator[tuple[str, str]]:
    """The levels that a schedule states, by factor: those of the layers whose heads are varied."""
    schedule = parse_heads(heads)
    for name, levels in vary.items():
        layers = [layer for each in levels.values() for field, layer in each.elements if field == "heads"]
        counts = {str(schedule[layer]) if layer < len(schedule) else "" for layer in layers}
        if len(counts) > 1 or counts - levels.keys():
            refuse(where, heads, f"layers of {name} have one head count of {', '.join(levels)}")
        yield from ((name, count) for count in counts)


def _with_controls(
    variants: Mapping[str, Variant], baselines: Sequence[str], levels: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, Variant]]:
    """The variants with what each is compared with: the baseline that shares all levels but one, or the one
    that it names."""
    rows = {name: each.levels for name, each in variants.items()}
    given = (match_variants(name, "baseline", levels, rows)[0] for name in baselines)
    named = dict.fromkeys(name for names in given for name in names)
    for name, variant in variants.items():
        against, others = variant.options.against, dict[int, str]()
        for other in named if against is None else rows:
            places = [at for at, level in enumerate(rows[other]) if level != variant.levels[at]]
            if len(places) == 1 and against in (None, rows[other][places[0]]):
                others[places[0]] = other
        if against is not None and (name in named or len(others) != 1):
            valid = ", ".join(each for each in levels.get(VARIANT, ()) if each != variant.levels[-1])
            valid = f"give another variant ({valid}), and none for the baseline"
            refuse(f"variants.{name}.against", against, valid)
        if name not in named and not others:
            refuse("baseline", baselines, f"{name} needs one that differs from it in one level alone")
        # Of two that differ in one level, the one that differs in a later factor.
        yield name, variant if name in named else replace(variant, control=others[max(others)])


# ---------------------------------------------------------------------- settings


class _Recipes:
    """Recipes by the name or file that a study gives: those in the study's file, else those of that name."""

    def __init__(self, given: Mapping[str, Settings]) -> None:
        self._given = given
        self._read: dict[str, Mapping[str, Any]] = {}

    @property
    def contents(self) -> dict[str, Settings]:
        """Settings of those that were asked for, as in the study's file."""
        return {key: nest(values) for key, values in self._read.items()}

    def __call__(self, name: str | None) -> Recipe:
        key = name or DEFAULT_RECIPE
        if key not in self._read:
            if key in self._given:
                self._read[key] = {"recipe": Path(key).stem} | flatten(self._given[key], f"recipes.{key}")
            else:
                self._read[key] = load_recipe(key, "study: recipe").values
        return Recipe(self._read[key], name is None)


def _make_variants(
    file: StudyFile, flags: Settings, tuned: Mapping[str, Tuned], made: Sequence[Parts], load: _Recipes
) -> Iterator[Variant]:
    """The variants of these levels; *flags* are settings of the command line, by dotted name."""
    common = read_settings(file.settings, "settings")
    _refuse_own(common, "settings")
    for parts in made:
        chosen = [level for _, level in parts.values()]
        options = LevelFile(**_merge_options(chosen))
        recipe: Recipe = load(options.recipe or file.recipe)
        given = common | {name: value for level in chosen for name, value in level.settings.items()}
        labels = tuple(label for label, _ in parts.values())
        if elements := {key: value for level in chosen for key, value in level.elements.items()}:
            given |= _set_elements(recipe.merge(given), elements)
        said = {f"{factor}: {label}": level for factor, (label, level) in parts.items()}
        said["--settings"] = Level(flags)
        tried, found = read_tune(file, options), tuned.get(".".join(labels))
        if tried and found and found.answers(*tried, file.pilot_seeds or ()):
            said[TUNED_FILE] = Level(read_settings({found.field: found.value}, TUNED_FILE))
            given |= said[TUNED_FILE].settings
        yield Variant(labels, given, recipe.merge(given), said, options)


def _merge_options(levels: Sequence[Level]) -> dict[str, Any]:
    """The options of all levels. A later one's tune and against count, as the file says."""
    merged: dict[str, Any] = {}
    for level in levels:
        for key in {"recipe", "seed_shift"} & level.options.keys() & merged.keys():
            if (other := merged[key]) != level.options[key]:
                refuse(key, level.options[key], f"another level says {quote(other)}; let one place set it")
        merged |= level.options
    return merged


def _schedule_of(model: ModelConfig, field: str) -> Any:
    """A schedule's values, or one for all layers; None if the model has none."""
    return model.block_widths if field == "block_width" else getattr(model, field)


def _check_variant(variant: Variant) -> None:
    """Compare a variant's run with its parts: setting once more what they say must change nothing.

    Raises:
        UserError: something else set a field that the study varies, tunes or was given by a flag.
    """
    made = flatten(to_dict(variant.run))
    for name, level in variant.parts.items():
        differing = diff_settings(variant.run, make_run(made | level.settings))
        for (field, layer), value in level.elements.items():
            whole = _schedule_of(variant.run.fixed_model_config(), field)
            own = whole[layer] if isinstance(whole, tuple) else whole
            if own != value:
                differing[f"{field}[{layer}]"] = own, value
        for setting, (own, value) in differing.items():
            said = f"{setting} is {quote(own)} where {name} says {quote(value)}; let one place set it"
            raise UserError(f"study: variant {variant.name}: {said}")


def _set_elements(settings: Settings, elements: Mapping[tuple[str, int], Any]) -> Settings:
    """The settings that have a value for each layer, with those of single layers in place."""
    model = make_run(settings).fixed_model_config()
    found: dict[str, list[Any]] = {}
    for (field, layer), value in elements.items():
        whole = _schedule_of(model, field) if field in SCHEDULES else None
        if whole is None and field not in ("rope_base", "local_window"):
            valid = f"give one of {', '.join(SCHEDULES)} that settings have for all layers"
            refuse("vary", f"{field}[{layer}]", valid)
        schedule = whole if isinstance(whole, tuple) else (whole,) * model.num_layers
        if layer >= model.num_layers:
            refuse("vary", f"{field}[{layer}]", f"the model has layers 0 to {model.num_layers - 1}")
        found.setdefault(field, list(schedule))[layer] = value
    return {name if name == "heads" else f"architecture.{name}": values for name, values in found.items()}


# ---------------------------------------------------------------------- checks


def _refuse_unmeasured(file: StudyFile, variant: Variant) -> None:
    """Reject a study whose runs would train to their end without the value that is compared."""
    run, measure = variant.run, file.measure
    other_task = "val_bpb" if run.task == "classification" else "val_accuracy"
    every = 1 if measure == "train_loss" else 0 if measure == other_task else run.validation.every
    times = -(-run.steps // every) if every else 0
    if times < file.last_validations:
        said = f"variant {variant.name} measures it {times:,} times (task, steps, validation.every), and "
        refuse("measure", measure, f"{said}last_validations is {file.last_validations}")


def _describe_runs(study: Study, name: str) -> str:
    """What a variant trains, however it is written, whatever value of a tuned setting it has been given."""
    variant = study.variants[name]
    setting, values = study.tried.get(name, (None, []))
    run = make_run({key: value for key, value in variant.settings.items() if key != setting})
    model = run.build_model_config()
    said = {key: value for key, value in to_dict(run).items() if key not in NOT_COMPARED}
    return repr((variant.options.seed_shift, setting, values, said, model))


def _refuse_equal(file: StudyFile, described: Mapping[str, str], valid: str) -> None:
    """Reject two variants of one description; *valid* has a place for the name of the first."""
    seen: dict[str, str] = {}
    for name, text in described.items():
        if (other := seen.setdefault(text, name)) != name:
            refuse("variants" if file.variants else "vary", name, valid.format(other))
