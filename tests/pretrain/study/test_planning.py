"""Study files: what they ask for, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import jsonschema
import pytest
import yaml

from pretrain.config.sources import Recipe, load_recipe, make_run, nest
from pretrain.study import Study
from pretrain.study.file import STUDIES, find_study, schema, study_names
from pretrain.study.planning import build_pilot, parse_study, read_study
from pretrain.study.results import load_results, load_study
from pretrain.study.running.scheduler import write_study
from tests.helpers.planted_runs import plant, planted_rows, result
from tests.helpers.refusals import refused

SMALL = """
recipe: micro
seeds: [4, 7]
settings: {steps: 60, optimizer: {learning_rate: 1.0e-3}, architecture: {d_model: 64}}
baseline: uniform
variants:
  uniform: {heads: 4x4}
  prism: {heads: "1,2,4x2", optimizer: {weight_decay: 0.0}, architecture: {ffn_width: 192}}
"""


def study(text=SMALL, out="runs/s"):
    return parse_study(text, "s", Path(out))


def changed(**values):
    return yaml.safe_dump({**yaml.safe_load(SMALL), **values}, sort_keys=False)


def test_recipe_settings_and_variant_are_laid_over_one_another():
    run = next(planned.run for planned in study().runs if planned.variant == "prism")
    # The study's, the variant's, the recipe's.
    assert run.optimizer.learning_rate == 1e-3 and run.optimizer.weight_decay == 0.0
    assert run.optimizer.gradient_clipping == 1.0 and run.vocab_size == 2048
    model = run.build_model_config()
    assert (model.d_model, model.ffn_width, model.heads) == (64, 192, (1, 2, 4, 4))
    assert run.recipe == "micro" and str(run.folder) == "runs/s/prism-s4"


def test_every_study_has_its_folder_in_the_mirror():
    """Runs of two studies have the same names, and so have pilots."""
    variants = {"uniform": {"heads": "4x4", "tune": {"optimizer.learning_rate": [1e-3, 2e-3]}}}
    settings = {"checkpoint": {"mirror": "s3://bucket/runs/"}}
    text = changed(settings=settings, pilot_seeds=[5, 6], variants=variants)
    made = study(text)
    assert {planned.run.checkpoint.mirror for planned in made.runs} == {"s3://bucket/runs/s"}
    pilots = {planned.run.checkpoint.mirror for planned in build_pilot(made).runs}
    assert pilots == {"s3://bucket/runs/s/pilot"}
    assert study().runs[0].run.checkpoint.mirror is None


def test_a_folder_is_read_from_inside_and_under_another_name(tmp_path, monkeypatch):
    made = study(changed(settings={"checkpoint": {"mirror": "s3://bucket/runs"}}), tmp_path / "s")
    write_study(made)
    plant(result(made.runs[0], planted_rows(made.runs[0], 3.5)))
    monkeypatch.chdir(tmp_path / "s")
    here = load_study(Path())
    assert here.runs[0].run.checkpoint.mirror == "s3://bucket/runs/s"
    assert load_results(here)[0].state == "finished"
    (tmp_path / "s").rename(tmp_path / "t")
    assert load_results(load_study(tmp_path / "t"))[0].state == "finished"


def test_a_seed_is_complete_before_the_next():
    assert [planned.name for planned in study().runs] == ["uniform-s4", "prism-s4", "uniform-s7", "prism-s7"]
    assert [planned.run.seed for planned in study().runs] == [4, 4, 7, 7]
    assert study(changed(seeds=3)).file.seeds == [1, 2, 3]


BAD_VALUES = [
    ("baseline: unifrom", "baseline: 'unifrom' is not valid; did you mean 'uniform'"),
    ("baseline:", "baseline: missing; give the variant that the others are compared with"),
    ("variants:", "variants: missing; give variants and a baseline, or vary"),
    ("variants: {uniform: {haeds: 4x4}}", "variants.uniform: haeds: unknown key; did you mean 'heads'"),
    ("variants: {uniform: {heads: 2,4,8,8}}", "'8' twice in one mapping; a text with commas needs quotes"),
    ("variants: {uniform: {heads: 2,4,8}}", "4: not the name of a setting; a text with commas needs quotes"),
    ("variants: {uniform: {heads: 5x4}}", "variant uniform: heads"),
    ("variants: {uniform: {seed: 3}}", "variants.uniform.seed: not a setting"),
    ("settings: {name: x}", "settings.name: not a setting of a study's runs"),
    ("variants: {uniform: {}, b: {heads: 2x4, against: x}}", "variants.b.against: 'x' is not valid"),
    ("variants: {uniform: {against: b}, b: {heads: 2x4}}", "uniform.against: 'b' is not valid"),
    ("variants: {uniform: {seed_shift: -1}}", "study: variants.uniform.seed_shift: -1 is not valid"),
    ("{variants: {a/b: {}}, baseline: a/b}", "variants: 'a/b' is not valid; give names that can be part"),
    ("settings: {model: prism-unknown}", "no preset 'prism-unknown'"),
    ("recipe: mirco", "recipe: no recipe or file 'mirco'"),
    ("seeds: [1, 1]", "seeds: [1, 1] is not valid; give a list such as [1, 2, 3], each once"),
    ("seeds: 0", "seeds: 0 is not valid; give a list such as [1, 2, 3]"),
    ("status: done", "status: 'done' is not valid; give open, confirmed, refuted, or superseded by STUDY"),
    ("predict: {a: 2,4,8,16}", "predict: 4: not the name of a setting; a text with commas needs quotes"),
    (
        "variants: {uniform: {architecture: {ffn_width: 2,4}}}",
        "architecture: 4: not the name of a setting; a text with",
    ),
    ("variants: {uniform: {}, b: {logging: {wandb: disabled}}}", "variants: 'b' is not valid; its runs are"),
    ("contrasts: [uniform-prism]", "variants are uniform, prism; operators need spaces around them"),
    ("predict: {x: 8x4}", "predict: {'x': '8x4'} is not valid; it needs the effects of levels"),
    ("last_validations: 9", "measure: 'val_loss' is not valid; variant uniform measures it 1 times"),
    ("measure: val_accuracy", "measure: 'val_accuracy' is not valid; variant uniform measures it 0 times"),
    ("settings: {validation: {every: 0}}", "'val_loss' is not valid; variant uniform measures it 0 times"),
    ("{recipe: classification, measure: val_bpb}", "variant uniform measures it 0 times"),
    ("variants: {uniform: {}, uniform: {heads: 2x4}}", "'uniform' twice"),
    ("vairants: {}", "vairants: unknown; did you mean 'variants'?"),
    (
        "{vary: {x: {a: {steps: 50}, a-b: {}}}, baseline: [a.b-c, a-b.c], variants: {a.b-c: {}, a-b.c: {}}}",
        "variants: 'a-b.c' is not valid; it would share a folder with a.b-c; rename one",
    ),
    ("extends: nothing", "study: no file or study 'nothing'"),
]


@pytest.mark.parametrize(("values", "said"), BAD_VALUES)
def test_bad_values_are_one_line(values, said):
    with refused(said, begins="study"):
        study(
            SMALL.split("variants")[0] + values
            if "2,4" in values or "twice" in said
            else changed(**yaml.safe_load(values))
        )


def test_a_variant_may_have_any_name():
    found = study("seeds: 1\nbaseline: 8\nvariants: {8: {heads: 8x4}, None: {heads: 4x4}, b: {}}\n")
    assert list(found.variants) == ["8", "None", "b"]
    assert found.variants["b"].control == "8"


# ---------------------------------------------------------------------- one meaning

RATE = (
    "seeds: 1\nrecipe: micro\nsettings: {steps: 40, validation.every: 40, optimizer.learning_rate: 5.0e-3}\n"
)
PILOTS = "pilot_seeds: [7]\nbaseline: a\nvariants: {a: {}, b: {heads: 4x4}}\n"


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("baseline: a\nvariants: {a: {}, b: {optimizer: {learning_rate: 1.0e-3}}}\n", [5e-3, 1e-3]),
        ("baseline: a\nvariants: {a: {}, b: {optimizer.learning_rate: 1.0e-3}}\n", [5e-3, 1e-3]),
        ("vary: {optimizer.learning_rate: [1.0e-3, 2.0e-3]}\n", [1e-3, 2e-3]),
        (
            "vary:\n  r: {low: {optimizer: {learning_rate: 1.0e-3}}, b: {optimizer.learning_rate: 2.0e-3}}",
            [1e-3, 2e-3],
        ),
        (f"tune: {{optimizer.learning_rate: [1.0e-3, 2.0e-3]}}\n{PILOTS}", [1e-3, 2e-3] * 2),
    ],
)
def test_a_dotted_setting_does_not_beat_what_a_study_varies(text, rates):
    found = study(RATE + text)
    runs = build_pilot(found).runs if found.tried else found.runs
    trained = [planned.run.optimizer.learning_rate for planned in runs]
    assert sorted(trained) == sorted(rates)
    for planned in runs if "vary" in text and "low" not in text else ():
        assert float(planned.definition.levels[0]) == planned.run.optimizer.learning_rate


def test_a_level_that_does_not_reach_its_run_is_refused(monkeypatch):
    """A planted plan: what is merged last wins over what the study varies."""
    text = RATE + "vary: {optimizer.learning_rate: [1.0e-3, 2.0e-3]}\n"
    merge = Recipe.merge
    monkeypatch.setattr(
        Recipe, "merge", lambda self, *given: merge(self, *given) | {"optimizer.learning_rate": 5e-3}
    )
    with refused(
        "optimizer.learning_rate is 0.005 where optimizer.learning_rate: 0.00", "let one place set it"
    ):
        study(text)


def test_two_places_that_set_one_thing_are_refused(tmp_path):
    with refused("heads is '"):
        study(RATE + "vary: {'heads[0]': [2, 4], heads: [8x4, 4x4]}", tmp_path)
    # What pilots choose would replace what the variant b is.
    with refused("variant b: heads: set by variant: b, and tune tries values of it"):
        study(RATE + f"tune: {{heads: [8x4, 4x4]}}\n{PILOTS}", tmp_path)


def test_flags_replace_settings_of_all_runs_or_are_refused():
    given = RATE + "vary: {optimizer.learning_rate: [1.0e-3, 2.0e-3]}\n", "s", Path("runs/s")
    with refused("is 0.002 where --settings says 0.001; let one place set it"):
        parse_study(*given, settings={"optimizer": {"learning_rate": 1e-3}})
    with refused("study: settings: haeds: unknown key; did you mean 'heads'"):
        parse_study(*given, settings={"haeds": 3})
    found = parse_study(*given, settings={"steps": 7, "validation.every": 7})
    assert {planned.run.steps for planned in found.runs} == {7}
    assert parse_study(found.text, "s", Path("runs/s")).runs[0].run == found.runs[0].run  # the folder's file


VALUES = {
    "steps": [50, 60],
    "heads": ["8x4", [2, 4, 8, 8], "2,4,8x2"],
    "optimizer.learning_rate": [1e-3, 2e-3],
    "optimizer.weight_decay": [0.0, 0.3],
    "schedule.warmup": [0.0, 0.1],
    "architecture.qk_norm": ["none", "weighted"],
    "architecture.context_length": [128, 256],
    "validation.every": [25, 50],
}


def spell(chosen, rng):
    """Settings nested, with dots, or both."""
    dotted = {name: value for name, value in chosen.items() if rng.random() < 0.5}
    nested = nest({name: value for name, value in chosen.items() if name not in dotted})
    return {**nested, **dotted} if not nested.keys() & dotted.keys() else nest(chosen)


@pytest.mark.parametrize("seed", range(40))
def test_every_spelling_of_a_study_plans_equal_runs(seed, tmp_path):
    """Settings of the study, of the file that it extends, of levels and of variants, in random spellings."""
    rng = random.Random(seed)
    chosen = {name: rng.choice(values) for name, values in VALUES.items() if rng.random() < 0.7}
    varied, other = rng.sample(sorted(VALUES.keys() - {"steps", "validation.every", "heads"}), 2)
    parent, common, own = {}, {}, {}
    for name, value in chosen.items():
        rng.choice((parent, common, own if name not in (varied, other) else {}))[name] = value
    (tmp_path / "parent.yaml").write_text(yaml.safe_dump({"recipe": "micro", "settings": spell(parent, rng)}))
    levels = {f"level{at}": spell({varied: value}, rng) for at, value in enumerate(VALUES[varied])}
    variants = zip("ab", VALUES[other], strict=True)
    values = {
        "extends": str(tmp_path / "parent.yaml"),
        "seeds": [1],
        "settings": spell(common, rng),
        "vary": rng.choice(({varied: VALUES[varied]}, {"it": levels})),
        "baseline": "a",
        "variants": {name: spell(own | {other: value}, rng) for name, value in variants},
    }
    found = study(yaml.safe_dump(values, sort_keys=False))
    recipe = {"recipe": "micro", **load_recipe("micro").values}
    expected = [
        make_run(recipe | chosen | {varied: first, other: second})
        for first in VALUES[varied]
        for second in VALUES[other]
    ]
    trained = [dataclasses.replace(planned.run, name=None, runs_dir="runs", seed=1) for planned in found.runs]
    assert trained == expected


# ---------------------------------------------------------------------- extends and the schema


def test_a_study_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text(f"{SMALL}title: Base\nquestion: Why?\neffect: 0.02\n")
    (tmp_path / "own.yaml").write_text("""
extends: base.yaml
settings: {optimizer.weight_decay: 0.5, steps: 70}
variants: {prism: null, flat: {heads: 2x4}}
effect: null
""")
    found = read_study(tmp_path / "own.yaml")
    assert list(found.variants) == ["uniform", "flat"] and found.file.seeds == [4, 7]
    assert (found.file.title, found.file.question, found.file.effect) == (None, None, None)
    run = found.runs[0].run
    assert (run.steps, run.optimizer.weight_decay, run.optimizer.learning_rate) == (70, 0.5, 1e-3)
    again = parse_study(found.text, "own", found.folder)  # as it is written into the folder
    assert [planned.run for planned in again.runs] == [planned.run for planned in found.runs]
    (tmp_path / "third.yaml").write_text(
        "extends: own\ncontrasts: {prism - uniform: null, more: flat - uniform}\n"
    )
    (tmp_path / "base.yaml").write_text(f"{SMALL}contrasts: [prism - uniform]\n")
    third = read_study(tmp_path / "third.yaml")  # by its name alone, in the same folder
    assert third.file.contrasts == {"more": "flat - uniform"}
    (tmp_path / "third.yaml").write_text("extends: own\nvariants: {unifrom: null}\n")
    with refused(
        "third.yaml: variants.unifrom: None is not valid", "did you mean 'uniform'", begins="study: /"
    ):
        read_study(tmp_path / "third.yaml")
    (tmp_path / "base.yaml").write_text("extends: own.yaml\nseeds: 1\n")
    with refused("it extends itself"):
        read_study(tmp_path / "own.yaml")


def test_the_schema_has_every_key_and_admits_every_study():
    found = schema()
    described = [each for each in found["properties"].values() if each["description"]]
    assert len(described) > 20 and "learning_rate" in json.dumps(found["$defs"])
    checker = jsonschema.Draft202012Validator(found)
    for path in STUDIES.glob("*.yaml"):
        values = json.loads(json.dumps(yaml.safe_load(path.read_text())))
        assert [error.message for error in checker.iter_errors(values)] == [], path
    wrong = (
        {"methd": "grid"},
        {"method": "half"},
        {"settings": {"stesp": 3}},
        {"variants": {"a": {"heds": 2}}},
    )
    assert not any(map(checker.is_valid, wrong))


def test_a_study_in_a_notebook(tmp_path):
    (tmp_path / "own.yaml").write_text(SMALL)
    found = Study.load(tmp_path / "own.yaml", tmp_path / "out", steps=40)
    plan = found.plan()
    assert list(plan.index) == ["uniform-s4", "prism-s4", "uniform-s7", "prism-s7"]
    assert set(plan.steps) == {40} and list(plan.variant)[:2] == ["uniform", "prism"]
    results = found.results()
    assert set(results.state) == {"missing"} and results.difference.isna().all()


# ---------------------------------------------------------------------- the studies included


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_comes_along_is_valid(name):
    found = read_study(find_study(name))
    assert found.title != name and found.file.machine and found.file.question
    # A level of a factor is in many runs of each seed.
    assert len(found.file.seeds) >= 3 or found.design
    if name.endswith("-small"):
        assert found.file.hours and all(planned.run.data == "builtin" for planned in found.runs)
