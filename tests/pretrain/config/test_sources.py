"""A setting has one meaning, however it is spelled and wherever it is given."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.declared import from_dict
from model.errors import UserError
from model.heads import format_heads
from pretrain import recipe
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import OptimizerConfig
from pretrain.config.sources import SECTIONS, diff_settings, flatten, load_run_config, make_run
from pretrain.study.planning import parse_study
from tests.helpers.fuzzing import fixed
from tests.helpers.refusals import refused

Spelling = tuple[str, Any]
"""As YAML text, and as a Python value."""


INTEGERS: list[Callable[[int], Any]] = [int, np.int64, np.int32, torch.tensor]


def of_integer(value: int, rng: random.Random) -> Spelling:
    return (
        rng.choice([str(value), f"0{value}", f"+{value}", f"0o{value:o}"]),
        rng.choice(INTEGERS)(value),
    )


def of_number(value: float, rng: random.Random) -> Spelling:
    return rng.choice([repr(value), f"{value:.17e}", f"{value:.20f}"]), rng.choice([float, np.float64])(value)


def of_text(value: str, rng: random.Random) -> Spelling:
    return json.dumps(value), rng.choice([str, str if "//" in value else Path])(value)


def of_switch(value: bool, rng: random.Random) -> Spelling:
    return rng.choice([str(value), str(value).lower(), str(value).upper()]), value


def of_counts(value: tuple[int, ...], rng: random.Random) -> Spelling:
    texts = [format_heads(value), ",".join(map(str, value)), " , ".join(f"{count}x1" for count in value)]
    text = rng.choice(texts)
    return (
        rng.choice([json.dumps(text), str(list(value)), json.dumps(str(list(value)))]),
        rng.choice([text, list(value), value, np.array(value)]),
    )


def of_windows(value: tuple[int | None, ...], rng: random.Random) -> Spelling:
    listed = json.dumps(list(value))
    return rng.choice([listed, json.dumps(listed[1:-1])]), rng.choice([list(value), value, listed])


def of_steps(value: dict[int, tuple[int, ...]], rng: random.Random) -> Spelling:
    written, python = {}, {}
    for step, counts in value.items():
        text, plain = of_counts(counts, rng)
        written[rng.choice([str(step), f"0{step}", json.dumps(str(step)), f"{step}.0"])] = text
        python[rng.choice([int, str])(step)] = plain
    return "{" + ", ".join(f"{key}: {text}" for key, text in written.items()) + "}", python


# Of each setting: what spells a value, and two valid values.
CASES: dict[str, tuple[Callable[..., Spelling], tuple[Any, Any]]] = {
    "steps": (of_integer, (10, 90)),
    "seed": (of_integer, (0, 77)),
    "data": (of_text, ("010", "some/folder")),
    "name": (of_text, ("010", "1e5")),
    "document_mask": (of_switch, (True, False)),
    "heads": (of_counts, ((8, 8, 4, 2), (2, 2, 2, 2))),
    "optimizer.learning_rate": (of_number, (1e-3, 0.25)),
    "optimizer.weight_decay": (of_number, (0.0, 0.1)),
    "optimizer.decay_embeddings": (of_switch, (True, False)),
    "schedule.warmup": (of_number, (0.5, 3.0)),
    "validation.every": (of_integer, (8, 100)),
    "checkpoint.mirror": (of_text, ("file:///a,b", "s3://x/y")),
    "growth.interval": (of_number, (0.1, 7.0)),
    "diagnostics.sequences": (of_integer, (1, 9)),
    "architecture.kv_heads": (of_counts, ((1, 1, 1, 1), (2, 2, 2, 2))),
    "architecture.head_dim": (of_counts, ((16, 16, 16, 16), (8, 16, 8, 16))),
    "architecture.local_window": (of_windows, ((None, 64, None, 64), (32, 32, None, None))),
    "architecture.context_length": (of_integer, (128, 512)),
    "architecture.z_loss": (of_number, (1e-4, 0.0)),
    "architecture.norm_bias": (of_switch, (True, False)),
}
SCHEDULE = {100: (2, 2, 2, 2), 300: (2, 2, 4, 4)}


def spell(values: Mapping[str, Any], rng: random.Random) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings as YAML and as Python, each with some sections nested, and others dotted."""
    written: dict[str, Any] = {}
    python: dict[str, Any] = {}
    for name, value in values.items():
        how = (
            of_steps
            if name == "growth.schedule"
            else of_text
            if name == "growth.criterion"
            else CASES[name][0]
        )
        for source, spelling in zip((written, python), how(value, rng), strict=True):
            given_name = rng.choice(["heads", "architecture.heads"]) if name == "heads" else name
            section, _, field = given_name.rpartition(".")
            if section and rng.random() < 0.5:
                source.setdefault(section, {})[field] = spelling
            else:
                source[given_name] = spelling
    return written, python


def as_yaml(written: Mapping[str, Any]) -> str:
    inner = (
        f"{key}: {as_yaml(value) if isinstance(value, dict) else value}" for key, value in written.items()
    )
    return "{" + ", ".join(inner) + "}"


def as_flags(written: Mapping[str, Any]) -> Iterable[str]:
    for name, value in written.items():
        section = name if isinstance(value, dict) and name in SECTIONS else ""
        if section and section != "architecture":  # the only section that is a flag
            yield from as_flags({f"{section}.{field}": inner for field, inner in value.items()})
        else:
            text = as_yaml(value) if section else value
            texts = name in ("data", "name", "checkpoint.mirror", "heads", "growth.criterion")
            yield from (f"--{name}", json.loads(text) if texts and text.startswith('"') else text)


def draw(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings, and others for some of the same fields, which they replace."""
    names = rng.sample(list(CASES), rng.randint(1, 8))
    chosen = {name: rng.choice(CASES[name][1]) for name in names}
    below = {name: rng.choice(CASES[name][1]) for name in names if rng.random() < 0.5}
    if "heads" not in names and rng.random() < 0.3:
        chosen |= {"growth.criterion": "schedule", "growth.schedule": SCHEDULE}
    return chosen, below


def expected(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What ``RunConfig`` must hold, written down from docs/configuration.md."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    if "heads" in plain:
        plain["heads"] = format_heads(plain["heads"])
    if "growth.schedule" in plain:
        plain["growth.schedule"] = {step: format_heads(counts) for step, counts in SCHEDULE.items()}
    return plain


def value_of(run: RunConfig, name: str) -> Any:
    section, _, field = name.rpartition(".")
    if section == "architecture":
        return run.architecture[field]
    return getattr(getattr(run, section) if section else run, field)


@given(st.randoms(use_true_random=False))
def every_spelling_at_every_door_gives_the_same_run(rng):
    chosen, below = draw(rng)
    with tempfile.TemporaryDirectory() as name:
        file, own = (Path(name, folder, "r.yaml") for folder in ("below", "own"))
        for path, settings in ((file, below), (own, chosen)):
            path.parent.mkdir()
            path.write_text(as_yaml(spell(settings, rng)[0]))
        runs = {
            "flags": parse_command_line(["--config", str(file), *as_flags(spell(chosen, rng)[0])]).run,
            "recipe": parse_command_line(["--config", str(own)]).run,
            "Python": recipe(str(file), **spell(chosen, rng)[1]),
        }
        runs["config.yaml"] = round_trip(Path(name), runs["recipe"])
        if not {"name", "seed"} & chosen.keys():  # a study sets them itself
            upper = {name: value for name, value in chosen.items() if rng.random() < 0.5}
            lower = {name: value for name, value in chosen.items() if name not in upper}
            text = (
                f"seeds: 1\nrecipe: {file}\nbaseline: a\nsettings: {as_yaml(spell(lower, rng)[0])}\n"
                f"variants: {{a: {as_yaml(spell(upper, rng)[0])}}}\n"
            )
            runs["study"] = make_run(
                parse_study(text, "s", Path(name), check_runs=False).runs[0].definition.settings
            )
    for door, run in runs.items():
        assert {name: value_of(run, name) for name in chosen} == expected(chosen), (door, chosen)
        assert run == runs["flags"] and diff_settings(run, runs["flags"]) == {}, door


def test_every_spelling_at_every_door_gives_the_same_run():
    fixed(every_spelling_at_every_door_gives_the_same_run, 40)


def round_trip(folder: Path, run: RunConfig) -> RunConfig:
    (folder / "config.yaml").write_text(run.to_yaml())
    return dataclasses.replace(load_run_config(folder / "config.yaml"), recipe=run.recipe)


TWICE = {
    "optimizer: {eps: 1.0e-3}\noptimizer.eps: 2.0e-3": "optimizer.eps: given twice",
    "heads: 2,4,8,8\narchitecture: {heads: 8x4}": "heads: given twice",
    "architecture.norm: layernorm\narchitecture: {norm: layernorm}": "architecture.norm: given twice",
    "heads: 8x4\narchitecture.heads: 8x4": "as heads and as architecture.heads; keep one",
}


@pytest.mark.parametrize("text", TWICE)
def test_two_spellings_of_one_setting_in_one_source_are_rejected(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with refused(TWICE[text]):
        parse_command_line(["--config", str(tmp_path / "r.yaml")])
    indented = text.replace("\n", "\n  ")
    with refused("study: settings: ", TWICE[text].replace(" in r", "")):
        parse_study(f"seeds: 1\nbaseline: a\nvariants: {{a: {{}}}}\nsettings:\n  {indented}\n", "s", tmp_path)
    with refused("given twice in the flags"):
        parse_command_line(["--heads", "8x4", "--architecture", "{heads: 8x4}"])


@pytest.mark.parametrize("empty", ["", "null", "{}"])
def test_an_empty_section_sets_nothing(tmp_path, empty):
    (tmp_path / "r.yaml").write_text(f"optimizer: {empty}\narchitecture: {empty}\nsteps: 5\n")
    run = parse_command_line(["--config", str(tmp_path / "r.yaml")]).run
    assert run.optimizer == OptimizerConfig() and run.architecture == {} and run.steps == 5


def test_a_section_may_be_an_object():
    taken = OptimizerConfig(learning_rate=0.5, betas=(0.1, 0.2))
    assert recipe("micro", optimizer=taken).optimizer == taken


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": object()}, "steps: <object object at"),
        ({"optimizer": {"betas": {1, 2}}}, "optimizer.betas: {1, 2} of type set is not valid"),
        ({"optimizer": [1]}, "optimizer: [1] is not valid; give a mapping of its fields"),
        (
            {"architecture": {"activation": "relu"}},
            "architecture.activation: 'relu' is not valid; give one of",
        ),
        (
            {"architecture": {"kv_heads": "2,x"}},
            "architecture.kv_heads: '2,x' is not valid; give n or nxN with",
        ),
        (
            {"architecture": {"local_window": [0]}},
            "architecture.local_window: [0] is not valid; give a number from 1 in layer 0, which has 0",
        ),
        ({"growth": {"schedule": {"100": "2x4", "0100": "4x4"}}}, "growth.schedule: step 100 is given twice"),
        ({8: 3}, "8: not the name of a setting"),
    ],
)
def test_a_value_that_no_setting_takes_is_named(settings, said):
    with refused(said):
        recipe("micro", **settings) if all(isinstance(key, str) for key in settings) else flatten(settings)


@pytest.mark.parametrize(
    "keys",
    [(100, "100"), (np.int64(100), "100"), ("1e2", 100.0, "100"), (100.5, "100.5"), (True, "true")],
    ids=str,
)
def test_keys_that_are_one_are_rejected_in_python(keys):
    """YAML's are rejected as they are read; JSON, in which a request is saved, would keep the last alone."""
    with refused("growth.schedule: ", "is given twice; keep one"):
        recipe("micro", growth={"criterion": "schedule", "schedule": dict.fromkeys(keys, "2x4")})


def test_null_unsets_a_text_by_a_flag():
    given = ["--config", "micro", "--name", "x", "--checkpoint.mirror", "file:///a", "--validation.data", "y"]
    run = parse_command_line(
        [*given, *["--name", "null", "--checkpoint.mirror", "null", "--validation.data", "null"]]
    ).run
    assert (run.name, run.checkpoint.mirror, run.validation.data) == (None, None, None)


def test_the_depth_is_changed_on_purpose_only():
    with refused("heads: '2,4,8' is a schedule for 3 layers, but prism-micro has 4", "num_layers 3 as well"):
        recipe("micro", heads="2,4,8").build_model_config()
    assert recipe("micro", heads="2,4,8", architecture={"num_layers": 3}).build_model_config().heads == (
        2,
        4,
        8,
    )
    uniform = recipe("micro", model="uniform-tiny", architecture={"num_layers": 9}).build_model_config()
    assert uniform.num_layers == 9 and len(set(uniform.heads)) == 1
    with refused("heads: missing; prism-micro has 4 layers of different head counts"):
        recipe("micro", architecture={"num_layers": 6}).build_model_config()


def test_equal_variants_are_rejected(tmp_path):
    def study(variants: str) -> str:
        return f"seeds: 1\nsettings: {{heads: 8x4}}\nbaseline: a\nvariants: {variants}\n"

    for same in (
        "{a: {}, b: {architecture.heads: 8x4}}",
        "{a: {seed_shift: 1}, b: {seed_shift: 1, steps: 1050}}",
    ):
        with refused("variants: 'b' is not valid; its runs are those of a"):
            parse_study(study(same), "s", tmp_path)
    parse_study(study("{a: {}, b: {seed_shift: 1}}"), "s", tmp_path)
    tuned = "seeds: 1\npilot_seeds: [5]\nbaseline: a\ntune: {muon.learning_rate: [0.1, 0.2]}\nvariants: "
    with refused("its runs are those of a"):
        parse_study(tuned + "{a: {}, b: {seed_shift: 0}}", "s", tmp_path)


def test_a_study_without_a_recipe_changes_no_model_of_a_file(tmp_path):
    from model.presets import preset

    (tmp_path / "m.json").write_text(json.dumps(preset("prism-nano").to_json()))
    text = f"seeds: 1\nsettings: {{model: {tmp_path}/m.json}}\nbaseline: a\nvariants: {{a: {{}}}}\n"
    assert parse_study(text, "s", tmp_path).runs[0].run.build_model_config() == preset("prism-nano")


def test_settings_that_differ_are_named_after_a_round_trip(tmp_path):
    """A saved request has been JSON: keys are text and tuples lists."""
    run = recipe(
        "micro",
        growth={"criterion": "schedule", "schedule": {20: "2x4", 40: "4x4"}},
        optimizer={"betas": (0.8, 0.9)},
        architecture={"rope_scaling": None, "local_window": (None, 8, None, 8)},
        lr_rules=["upper_qk"],
    )
    saved = from_dict(RunConfig, json.loads(json.dumps(run.to_dict())))
    assert saved == run and diff_settings(saved, run) == {}
    other = recipe("micro", steps=7, optimizer={"eps": 1e-9})
    assert {"steps": (run.steps, 7), "optimizer.eps": (1e-8, 1e-9)}.items() <= diff_settings(
        run, other
    ).items()


def test_unknown_spellings_are_rejected():
    with pytest.raises(UserError, match=r"architecture\.rope_scaling\.factor: unknown key"):
        flatten({"architecture.rope_scaling.factor": 3})
