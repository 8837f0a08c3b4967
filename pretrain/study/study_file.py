"""Study: which runs a study file asks for. See docs/studies.md for the format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.declared import from_dict, to_dict
from model.errors import UserError, quote, suggest
from model.heads import HeadSchedule
from pretrain.config.run_config import RunConfig, is_folder_name
from pretrain.config.sources import Recipe, diff_settings, load_recipe, make_run
from pretrain.study.contrasts import full_name, parse_contrasts, refuse
from pretrain.study.design.factors import read_design
from pretrain.study.pilots.halving import Halving, list_remaining, read_kept, rung_folder, rung_text
from pretrain.study.pilots.tuning import PILOT, TUNED_FILE, Tuned, pilot_text, read_tuned
from pretrain.study.planned import Comparison, ComparisonFile, PlannedRun, Study, StudyFile, Variant
from pretrain.study.settings import OF_A_VARIANT, Settings, is_name_part, label, read_settings
from pretrain.utils.parsing import parse_yaml, read_text

STUDIES = Path(__file__).resolve().parents[1] / "studies"
OF_A_STUDY = {"name", "runs_dir", "seed", "resume", "recipe"}
"""Fields that the study sets itself."""
NOT_THE_RUN = {"name", "runs_dir", "resume", "recipe", "data_root", "threads", "logging", "interruption"}
"""Fields that do not change what a run computes, or (threads) only its rounding."""


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
        f"study: no file or study {quote(str(name))}; studies are {', '.join(study_names())}"
        + suggest(str(name), study_names())
    )


def read_study(
    path: Path, out: Path | None = None, name: str | None = None, check_runs: bool = True
) -> Study:
    """Read and check a study file, and the RunConfig of each of its variants.

    Args:
        out: the study's folder; ``runs/NAME`` by default.
        name: the study's name; the file's by default.
        check_runs: whether to check the variants' settings now; else those of a run are checked where it is
            first used.

    Raises:
        UserError: it names the file's field, its value and what would be valid; nothing has been run or
            written.
    """
    name = path.stem if name is None else name
    out = out or Path("runs") / name
    return parse_study(read_text(path, "study"), name, out, f"study: {path}", check_runs)


def parse_study(
    text: str, name: str, out: Path, where: str = "study", check_runs: bool = True, pilots: bool = False
) -> Study:
    """As read_study, of a file's contents.

    Args:
        where: begins the messages about its YAML.
        pilots: whether its runs are pilots, of which several may be equal.
    """
    file = from_dict(StudyFile, parse_yaml(text, where), "study")
    if not is_folder_name(name):
        raise UserError(f"study: {quote(name)} is not the name of a folder; call the file otherwise")
    _check_tuning(file)
    tuned = read_tuned(out) if file.tune or file.rates else {}
    comparisons = tuple(_comparisons(file, tuned))
    names = [(each.name, variant) for each in comparisons for variant in each.variants]
    rungs = read_kept(out) if file.halving else []
    going = set(list_remaining(list(map(full_name, names)), rungs))
    every = _runs(comparisons, file.seeds, out)
    runs = tuple(planned for planned in every if planned.full_name in going)
    for planned in runs if check_runs else ():
        _ = planned.run
    contrasts = tuple(parse_contrasts(file.contrasts or {}, names))
    study = Study(name, out, file, comparisons, runs, contrasts, text, tuned, rungs)
    _refuse_doubles(study.of_first_seed)
    if check_runs and not pilots:
        _refuse_equal(study)
    for planned in study.of_first_seed if check_runs else ():
        _refuse_unmeasured(file, planned)
    return study


def build_pilot(study: Study) -> Study:
    """The study of the pilots of the variants of *study*, which has tune or rates, in its folder."""
    text = pilot_text(to_dict(study.file), study.file.pilot_seeds or [], study.tried)
    return parse_study(text, f"{study.name}-{PILOT}", study.folder / PILOT, pilots=True)


def build_rung(study: Study) -> Study:
    """The study of the next rung of *study*, which has halving, in its folder."""
    rung, halving = study.next_rung or 1, study.file.halving or Halving([0.5])
    steps = {planned.full_name: planned.run.steps for planned in study.of_first_seed}
    text = rung_text(to_dict(study.file), halving, rung, study.file.pilot_seeds or [], steps)
    name, folder = f"{study.name}-{rung_folder(rung)}", study.folder / rung_folder(rung)
    return parse_study(text, name, folder, pilots=True)


def _check_tuning(file: StudyFile) -> None:
    """Refuse pilots without seeds of their own, and seeds without pilots."""
    if file.halving and (file.tune or file.rates):
        refuse("halving", to_dict(file.halving), "tune what is left in a study of its own")
    if file.tune and file.rates:
        refuse("rates", file.rates, "give either tune or rates")
    for key, values in {"rates": file.rates, **(file.tune or {})}.items():
        names = list(map(label, values or ()))
        if len(set(names)) < len(names) or not all(map(is_name_part, names)):
            valid = "give values, each once, whose texts can be part of a folder's name, without spaces"
            refuse(key if key == "rates" else f"tune.{quote(key, plain=True)}", values, valid)
    pilots = file.tune or file.rates or file.halving
    if pilots and not file.pilot_seeds:
        raise UserError(
            "study: pilot_seeds: missing; tune, rates and halving need seeds that the study does not report"
        )
    if file.pilot_seeds and not pilots:
        refuse("pilot_seeds", file.pilot_seeds, "give tune, rates or halving, or leave them out")
    if shared := set(file.seeds) & set(file.pilot_seeds or ()):
        refuse("pilot_seeds", file.pilot_seeds, f"seed {min(shared)} is one of the study's; give others")


def _comparisons(file: StudyFile, tuned: Mapping[str, Tuned]) -> Iterator[Comparison]:
    read = functools.cache(functools.partial(load_recipe, what="study: recipe"))
    alone = ComparisonFile(file.variants, file.baseline, file.design)
    if (file.comparisons is None) == (alone == ComparisonFile()):
        raise UserError(
            "study: give either variants and a baseline, which is one of them, or a design, or comparisons "
            "that have these"
        )
    if file.comparisons is None:
        yield _comparison("", alone, file, read(file.recipe), tuned)
    for name, own in (file.comparisons or {}).items():
        recipe = read(own.recipe or file.recipe)
        yield _comparison(_folder_part(name, "comparisons"), own, file, recipe, tuned)


def _comparison(
    name: str,
    own: ComparisonFile,
    file: StudyFile,
    recipe: Recipe,
    tuned: Mapping[str, Tuned],
) -> Comparison:
    where = f"comparisons.{name}." if name else ""
    common: dict[str, Any] = {}
    for place, given_settings in (("settings", file.settings), (f"{where}settings", own.settings)):
        common |= read_settings(given_settings, place)
    design = None
    if own.design is not None and (file.tune or file.rates):
        refuse("tune", file.tune or file.rates, "in a design give the field as a factor")
    if own.design is not None and file.halving:
        refuse("halving", to_dict(file.halving), "a design needs all its runs")
    if own.design is not None and own.variants is None and own.baseline is None:
        given: Mapping[str, Settings | None]
        design, given = read_design(own.design, _heads(recipe.merge(common), name))
    elif own.variants is not None and own.baseline is not None and own.design is None:
        given = own.variants
    else:
        raise UserError(
            f"study: {where}variants: give either variants and a baseline, which is one of them, or a design"
        )
    for variant in given:
        _folder_part(variant, f"{where}variants")
    if own.baseline is not None and own.baseline not in given:
        valid = f"it must be one of the variants: {', '.join(given)}{suggest(own.baseline, given)}"
        refuse(f"{where}baseline", own.baseline, valid)
    variants = {
        variant: _variant(name, variant, fields or {}, common, recipe, tuned)
        for variant, fields in given.items()
    }
    for variant, made in variants.items():
        if made.rates is not None and not file.rates:
            refuse(f"{where}variants.{variant}.rates", made.rates, "give rates for the whole study, too")
        if made.against is not None and file.halving:
            refuse(f"{where}variants.{variant}.against", made.against, "with halving all have the baseline")
        if made.against is not None and (
            made.against not in variants or made.against == variant or variant == own.baseline
        ):
            others = ", ".join(each for each in variants if each != variant)
            valid = f"give another variant ({others}), and none for the baseline"
            refuse(f"{where}variants.{variant}.against", made.against, valid)
    return Comparison(name, variants, own.baseline, design)


def _variant(
    comparison: str,
    name: str,
    given: Settings,
    common: Mapping[str, Any],
    recipe: Recipe,
    tuned: Mapping[str, Tuned],
) -> Variant:
    where = f"comparisons.{comparison}." if comparison else ""
    at = f"{where}variants.{name}"
    given = dict(given)
    keys = {key: given.pop(key) for key in OF_A_VARIANT if key in given}
    full = full_name((comparison, name))
    sources = [common, read_settings(given, at)]
    for key in {key for source in sources for key in source} & OF_A_STUDY:
        raise UserError(f"study: {at}.{key}: not a setting of a study's runs; leave it out")
    if full in tuned:
        sources.append(read_settings({tuned[full].field: tuned[full].value}, TUNED_FILE))
    own = recipe.merge(*sources)
    try:
        return Variant(full, own, **keys)
    except UserError as error:
        raise UserError(f"study: {at}.{error}") from None


def _heads(settings: Settings, name: str) -> HeadSchedule:
    """The head schedule that a design begins from."""
    try:
        return make_run(settings).build_model_config().heads
    except UserError as error:
        raise UserError(f"study: comparison {name}: {error}" if name else f"study: {error}") from None


def _runs(comparisons: Sequence[Comparison], seeds: Sequence[int], out: Path) -> Iterator[PlannedRun]:
    for seed in seeds:
        for comparison in comparisons:
            for name, variant in comparison.variants.items():
                yield PlannedRun(comparison.name, name, seed, variant, out)


def _refuse_unmeasured(file: StudyFile, planned: PlannedRun) -> None:
    """Refuse a study whose runs would train to their end without the figure that is compared."""
    run, measure = planned.run, file.measure
    other_task = "val_bpb" if run.task == "classification" else "val_accuracy"
    every = 1 if measure == "train_loss" else 0 if measure == other_task else run.validation.every
    times = -(-run.steps // every) if every else 0
    if times < file.last_validations:
        said = (
            f"variant {planned.full_name} measures it {times:,} times (task, steps, validation.every), and "
        )
        refuse("measure", measure, f"{said}last_validations is {file.last_validations}")


def _refuse_doubles(runs: Sequence[PlannedRun]) -> None:
    """Refuse two runs whose folders would have one name (a: b-c and a-b: c)."""
    seen: dict[str, str] = {}
    for planned in runs:
        other = seen.setdefault(planned.name, planned.full_name)
        if other != planned.full_name:
            refuse("variants", planned.full_name, f"it would share the folder {planned.name} with {other}")


def _refuse_equal(study: Study) -> None:
    """Refuse two variants of a comparison that train the same model in the same way with the same seeds,
    whatever value of a tuned field each has been given."""
    seen: dict[str, str] = {}
    for planned in study.of_first_seed:
        field, values = study.tried.get(planned.full_name, (None, []))
        run = planned.definition.run
        if field is not None:
            run = make_run(
                {name: value for name, value in planned.definition.settings.items() if name != field}
            )
        model = run.build_model_config()
        run = dataclasses.replace(run, model="", heads=None, architecture={})
        compared = repr((planned.comparison, planned.definition.seed_shift, field, values, run, model))
        other = seen.setdefault(compared, planned.full_name)
        if other != planned.full_name:
            valid = f"its runs are those of {other}; vary a setting, or give seed_shift for other seeds"
            refuse("variants", planned.full_name, valid)


def diff_fields(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ, by dotted name; without those that do not change what is
    computed."""
    differing = diff_settings(one, other)
    return {name: values for name, values in differing.items() if name.split(".")[0] not in NOT_THE_RUN}


def _folder_part(name: str, where: str) -> str:
    if not is_name_part(name):
        refuse(where, name, "give names that can be part of a folder's, without spaces")
    return name
