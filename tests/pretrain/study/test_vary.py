"""Studies that vary factors: what is trained, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.helpers.planted_runs import planned_study
from tests.helpers.refusals import refused

TEXT = """
seeds: [3, 4]
settings: {steps: 10, validation: {every: 10}, optimizer: {weight_decay: 0.2}}
method: orthogonal
runs: 16
vary:
  heads[0]: [2, 4, 8, 16]
  heads[1:3]: [2, 4, 8, 16]
  optimizer.learning_rate: [1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3]
  scale:
    sqrt: {}
    linear: {architecture: {attention_scale: head_dim, attention_scale_base: 16}}
contrasts: {early: "heads[0]=2 - mean(heads[0]=8, heads[0]=16)"}
predict: {rising: [2, 4, 4, 8]}
"""
LAYERS = {f"heads[{layer}]": [2, 4, 8, 16] for layer in range(4)}
ALONE = {"contrasts": None, "predict": None}


def study(**changes):
    return planned_study(Path("runs/it"), **({"recipe": "micro"} | yaml.safe_load(TEXT) | changes))


def grid(vary, **changes):
    return study(method="grid", runs=None, vary=vary, **(ALONE | changes))


def test_every_combination_is_a_variant_with_its_levels():
    found = study()
    assert (len(found.variants), len(found.runs)) == (16, 32)
    for variant in found.variants.values():
        first, middle, rate, scale = variant.levels
        run = variant.run
        model = run.build_model_config()
        assert model.heads == (int(first), int(middle), int(middle), 8)  # the last layer is the preset's
        assert (run.optimizer.learning_rate, run.optimizer.weight_decay) == (float(rate), 0.2)
        expected = ("head_dim", 16) if scale == "linear" else ("sqrt_head_dim", None)
        assert (model.attention_scale, model.attention_scale_base) == expected
        assert variant.control is None
    assert found.design.predict == {"rising": {"heads[0]": "2", "heads[1:3]": "4"}}
    assert found.runs[0].name == "-".join(found.runs[0].definition.levels) + "-s3"


def test_what_can_be_estimated_is_said():
    for method, runs, strength in (("fractional", 64, 3), ("orthogonal", 16, 2), ("grid", None, 4)):
        found = study(method=method, runs=runs, vary=LAYERS, **ALONE)
        assert (found.design.strength, len(found.variants)) == (strength, runs or 256)
    assert study().design.described == (
        "16 of 4^3 x 2 combinations; main effects are balanced, and each is confounded with interactions of "
        "two other factors"
    )
    several = grid({"steps": [10, 20], "precision": ["fp32", "bf16"], "heads[0]": [2, 4]})
    assert several.design.described.endswith("interactions of two factors can be estimated")


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("architecture.tie_embeddings", [True, False]),
        ("steps", [10, 20]),
        ("optimizer.learning_rate", [1e-3, 0.5]),
        ("heads", [[2, 4, 8, 8], "8x4"]),
        ("ffn_width[0]", [192, 384]),
    ],
)
def test_any_setting_is_varied_and_named_by_its_values(setting, values):
    found = grid({setting: values, "optimizer.weight_decay": [0.0, 0.1]}, settings={"steps": 10})
    assert len(found.variants) == 4
    own = [each.settings.get(setting) for each in found.variants.values()]
    if setting.endswith("]"):
        name, layer = setting[:-3], int(setting[-2])
        whole = [getattr(each.run.build_model_config(), name) for each in found.variants.values()]
        own = [each[layer] if isinstance(each, tuple) else each for each in whole]
    assert Counter(map(str, own)) == Counter(map(str, 2 * values))


@pytest.mark.parametrize(
    ("setting", "values", "written"),
    [
        ("architecture.tie_embeddings", [True, False], "true - false"),
        ("architecture.logit_softcap", [None, 30], "null - 30"),
        ("optimizer.learning_rate", [1e-3, 0.5], "1e-3 - 0.50"),
    ],
)
def test_levels_are_called_as_the_file_spells_them(setting, values, written):
    """In contrasts, and as a baseline, in which YAML has read them as values."""
    found = grid({setting: values, "steps": [10, 20]}, contrasts=[written])
    assert sorted(found.contrasts[0].weights.values()) == [-0.5, -0.5, 0.5, 0.5]
    if values[0] is not None:
        control = grid({setting: values}, baseline=values[0]).variants
        assert [each.control for each in control.values()].count(None) == 1


def test_a_factor_beside_variants_is_crossed_with_them():
    found = study(
        method=None,
        runs=None,
        **ALONE,
        seeds=1,
        vary={"scale": {"small": {"recipe": "micro"}, "large": {"recipe": "tiny", "steps": 20}}},
        baseline=["small.a", "large.b"],
        variants={"small.a": {}, "b": {"heads": "4x4"}, "c": {"heads": "2x4", "against": "b"}},
        settings={"validation": {"every": 5}, "architecture": {"num_layers": 4, "d_model": 128}},
    )
    names = ["small-a", "small-b", "small-c", "large-b", "large-c"]
    assert [planned.name for planned in found.runs] == [f"{name}-s1" for name in names]
    assert [planned.run.recipe for planned in found.runs] == ["micro"] * 3 + ["tiny"] * 2
    assert [planned.run.steps for planned in found.runs][3:] == [20, 20]
    controls = [each.control for each in found.variants.values()]
    assert controls == [None, "small.a", "small.b", None, "large.b"]


SCALES = {"scale": {"small": {"recipe": "micro"}, "large": {"recipe": "tiny", "seed_shift": 7}}}
TWICE = [
    ({"large.b": {"steps": 8}, "b": {"steps": 9}}, "variants: 'b' is not valid; large has two of that name"),
    ({"b": {"recipe": "mini"}}, "recipe: 'mini' is not valid; another level says 'micro'"),
    ({"b": {"seed_shift": 9}}, "seed_shift: 9 is not valid; another level says 7"),
]


@pytest.mark.parametrize(("variants", "said"), TWICE)
def test_what_two_places_say_of_a_variant_is_refused(variants, said):
    changes = {"method": None, "runs": None, "vary": SCALES, "baseline": "a", **ALONE}
    with refused(said, begins="study: "):
        study(**changes, variants={"a": {}} | variants)


def test_widths_of_a_layer_that_make_all_equal():
    """The model's own value is then that of all layers."""
    settings = {
        "steps": 10,
        "validation": {"every": 10},
        "architecture": {"block_width": [192, 128, 128, 128]},
    }
    found = grid({"block_width[0]": [128, 192]}, settings=settings)
    widths = {name: each.run.build_model_config().block_widths for name, each in found.variants.items()}
    assert widths == {"128": (128,) * 4, "192": (192, 128, 128, 128)}


def test_a_level_that_a_factor_names_is_the_baseline_of_each_combination():
    vary = {"rule": {"control": {}, "slow": {"lr_rules": ["upper_qk"]}}, "heads": ["8x4", "4x4"]}
    found = grid(vary, baseline="control", contrasts={"rule": "slow - control"})
    controls = [each.control for each in found.variants.values()]
    assert controls == [None, None, "control.8x4", "control.4x4"]
    weights = dict(zip(found.variants, (-0.5, -0.5, 0.5, 0.5), strict=True))
    assert found.contrasts[0].weights == pytest.approx(weights)


BAD = [
    ({"method": "half"}, "method: 'half' is not valid"),
    ({"runs": 15}, "runs: 15 is not valid; 4 factors of 2 and 4 levels take 16"),
    ({"runs": None}, "method: 'orthogonal' is not valid; it needs vary and runs"),
    ({"method": "grid"}, "runs: 16 is not valid; method grid takes all 128 combinations"),
    ({"method": "fractional"}, "runs: 16 is not valid; 4 factors of 2 and 4 levels and strength 3"),
    ({"predict": {"x": "2,4,8,8"}}, "layers of heads[1:3] have one head count"),
    (
        {"predict": {"x": "3,4,4,8"}},
        "predict.x: '3,4x2,8' is not valid; layers of heads[0] have one head count of 2, 4, 8, 16",
    ),
    ({"tune": {"steps": [1, 2]}}, "tune: {'steps': [1, 2]} is not valid; without a baseline, vary"),
]
BAD_FACTORS = [
    ({"heads[0]": [2], "heads[1]": [2, 4]}, "vary.heads[0]: [2] is not valid; give from 2 to 16 levels"),
    ({"heads[0]": [2, 4], "heads[0:2]": [2, 4]}, "variant 2.4: heads[0] is 4 where heads[0]: 2 says 2"),
    ({"heads[9]": [2, 4], "heads[1]": [2, 4]}, "vary: 'heads[9]' is not valid; the model has layers 0 to 3"),
    ({"d_model[0]": [2, 4]}, "vary: 'd_model[0]' is not valid; give one of heads, kv_heads, head_dim"),
    ({"head_dim[0]": [8, 16]}, "vary: 'head_dim[0]' is not valid; give one of heads"),
    ({"heads[2:1]": [2, 4]}, "vary: 'heads[2:1]' is not valid; it names no layer; give heads[2:3]"),
    ({"heads[0]": {"few": 2, "many": 8}}, "vary.heads[0].levels.few: 2 is not valid; give a mapping"),
    ({"seed": [11, 12]}, "vary.seed: not a setting of a study's runs; leave it out"),
    ({"recipe": ["micro", "mini"]}, "vary.recipe: not a setting of a study's runs; give it next to settings"),
    ({"heads[0]": [2, 2], "heads[1]": [2, 4]}, "each once"),
    ({"heads[0]": [3, 4], "heads[1]": [2, 4]}, "variant 3.4: heads"),
    ({"a": {"x y": {}, "z": {}}, "heads[1]": [2, 4]}, "without spaces"),
    ({"a": {"x": {"haeds": 2}, "z": {}}}, "study: vary.a.x: haeds: unknown key; did you mean 'heads'"),
    ({"haeds": [2, 4]}, "study: vary: haeds: unknown key; did you mean 'heads'"),
    ({"steps": [5, 6], "b": {"x": {"steps": 5}, "y": {}}}, "steps is 5 where steps: 6 says 6; let one place"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_bad_values_are_one_line(changes, said):
    with refused(said, begins="study: "):
        study(**changes)


@pytest.mark.parametrize(("vary", "said"), BAD_FACTORS)
def test_bad_factors_are_one_line(vary, said):
    with refused(said, begins="study: "):
        grid(vary)


def test_combinations_come_in_a_random_order_that_is_always_the_same():
    first, again = ([*grid(LAYERS).variants] for _ in range(2))
    assert first == again != sorted(first) and len(set(first)) == 256
    for place in range(4):
        counts = Counter(name.split(".")[place] for name in first[:64])
        assert set(counts) == {"2", "4", "8", "16"} and min(counts.values()) > 6
