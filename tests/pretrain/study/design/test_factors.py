"""Designs of study files: what is trained, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from pretrain.study.study_file import parse_study
from tests.helpers.refusals import refused

DESIGN = """
seeds: [3, 4]
settings: {steps: 10, validation: {every: 10}, optimizer: {weight_decay: 0.2}}
design:
  kind: orthogonal
  runs: 16
  factors:
    layer_0: [2, 4, 8, 16]
    layers_1-2: [2, 4, 8, 16]
    optimizer.learning_rate: [1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3]
    scale:
      sqrt: {}
      linear: {architecture: {attention_scale: head_dim, attention_scale_base: 16}}
  contrasts: {early: {factor: layer_0, plus: 2, minus: [8, 16]}}
  predict: {rising: "2,4,4,8", slow: {optimizer.learning_rate: 0.001}}
"""


def study(text=DESIGN, **design):
    values = yaml.safe_load(text)
    values["design"] |= design
    return parse_study(yaml.safe_dump({"recipe": "micro"} | values, sort_keys=False), "it", Path("runs/it"))


def by(factor, plus, minus):
    own = {"factor": "layer_0", "plus": 2, "minus": 4}
    return {"x": own | {"by": {"factor": factor, "plus": plus, "minus": minus}}}


def test_every_row_is_a_variant_with_its_levels():
    found = study()
    (comparison,) = found.comparisons
    assert len(comparison.variants) == 16
    assert len(found.runs) == 32
    for name, variant in comparison.variants.items():
        first, middle, rate, scale = name.split("-")
        run = variant.run
        model = run.build_model_config()
        assert model.heads == (int(first), int(middle), int(middle), 8)  # the last layer is the preset's
        assert (run.optimizer.learning_rate, run.optimizer.weight_decay) == (float(rate), 0.2)
        expected = ("head_dim", 16) if scale == "linear" else ("sqrt_head_dim", None)
        assert (model.attention_scale, model.attention_scale_base) == expected
    assert comparison.baseline is None
    assert all(comparison.baseline_of(name) == name for name in comparison.variants)


def test_what_is_predicted_states_levels():
    (comparison,) = study().comparisons
    rising = {"layer_0": "2", "layers_1-2": "4"}
    assert comparison.design.predict == {"rising": rising, "slow": {"optimizer.learning_rate": "0.001"}}


def test_kinds():
    layers = {f"layer_{layer}": [2, 4, 8, 16] for layer in range(4)}
    for kind, runs, strength in (("fractional", 64, 3), ("orthogonal", 16, 2), ("full", None, 4)):
        (comparison,) = study(kind=kind, runs=runs, factors=layers, contrasts={}, predict={}).comparisons
        assert comparison.design.strength == strength
        assert len(comparison.variants) == (runs or 256)


def test_what_can_be_estimated_is_said():
    (comparison,) = study().comparisons
    assert comparison.design.described == (
        "16 of 4^3 x 2 combinations; main effects are balanced, and each is confounded with interactions of "
        "two other factors"
    )
    factors = {"steps": [10, 20], "precision": ["fp32", "bf16"], "layer_0": [2, 4]}
    (comparison,) = study(kind="full", runs=None, factors=factors, contrasts={}, predict={}).comparisons
    assert comparison.design.described.endswith("interactions of two factors can be estimated")


@pytest.mark.parametrize(
    ("field", "levels"), [("tie", [True, False]), ("steps", [10, 20]), ("rate", [1e-3, 0.5])]
)
def test_values_name_their_levels_in_contrasts_and_predictions(field, levels):
    name = {"tie": "architecture.tie_embeddings", "steps": "steps", "rate": "optimizer.learning_rate"}[field]
    contrast = {"factor": name, "plus": levels[0], "minus": levels[1:]}
    changes = {"contrasts": {"x": contrast}, "predict": {"y": {name: levels[0]}}}
    (comparison,) = study(
        kind="full", runs=4, factors={name: levels, "layer_0": [2, 4]}, **changes
    ).comparisons
    design = comparison.design
    assert (design.contrasts["x"].plus, design.contrasts["x"].minus) == (
        [design.factors[0].levels[0]],
        [design.factors[0].levels[1]],
    )
    assert design.predict["y"] == {name: design.factors[0].levels[0]}


def test_two_factors_may_set_fields_of_one_section():
    factors = {"optimizer.learning_rate": [1e-3, 2e-3], "optimizer.weight_decay": [0.0, 0.1]}
    (comparison,) = study(kind="full", runs=4, factors=factors, contrasts={}, predict={}).comparisons
    found = {
        (v.run.optimizer.learning_rate, v.run.optimizer.weight_decay) for v in comparison.variants.values()
    }
    assert found == {(1e-3, 0.0), (1e-3, 0.1), (2e-3, 0.0), (2e-3, 0.1)}


def test_designs_stand_beside_other_comparisons():
    values = yaml.safe_load(DESIGN)
    design = values.pop("design")
    variants = {"baseline": "a", "variants": {"a": {}, "b": {"heads": "4x4"}}}
    values["comparisons"] = {"map": {"design": design}, "pair": variants}
    found = parse_study(yaml.safe_dump({"recipe": "micro"} | values, sort_keys=False), "it", Path("runs/it"))
    assert [(each.name, len(each.variants)) for each in found.comparisons] == [("map", 16), ("pair", 2)]


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ({"kind": "half"}, "design.kind: 'half' is not valid"),
        ({"runs": 15}, "design.runs: 15 is not valid; 4 factors of 2 and 4 levels take 16"),
        ({"runs": None}, "design.runs: missing"),
        ({"kind": "full"}, "design.runs: 16 is not valid; kind full takes all 128 combinations"),
        ({"kind": "fractional"}, "design.runs: 16 is not valid; 4 factors of 2 and 4 levels and strength 3"),
        ({"factors": {"layer_0": [2, 4]}}, "design.factors"),
        ({"factors": {"layer_0": [2], "layer_1": [2, 4]}}, "design.factors.layer_0: [2] is not valid"),
        ({"factors": {"layer_0": [2, 4], "layers_0-1": [2, 4]}}, "'layers_0-1' is not valid; layer 0 is in"),
        ({"factors": {"layer_9": [2, 4], "layer_1": [2, 4]}}, "'layer_9' is not valid; the model has layers"),
        ({"factors": {"layer_0": [2, "x"], "layer_1": [2, 4]}}, "design.factors.layer_0: [2, 'x']"),
        ({"factors": {"layer_0": [2, 2], "layer_1": [2, 4]}}, "each once"),
        ({"factors": {"a": {"x y": {}, "z": {}}, "layer_1": [2, 4]}}, "without spaces"),
        (
            {"factors": {"steps": [5, 6], "b": {"x": {"steps": 5}, "y": {}}}},
            "another factor sets steps; vary each by one",
        ),
        ({"contrasts": {"x": {"factor": "layer_7", "plus": 2, "minus": 4}}}, "x.factor: 'layer_7'"),
        ({"contrasts": {"x": {"factor": "layer_0", "plus": 3, "minus": 4}}}, "contrasts.x: '3' is not valid"),
        ({"contrasts": {"x": {"factor": "layer_0", "plus": 4, "minus": 4}}}, "name each once"),
        ({"contrasts": {n: {"factor": "layer_0", "plus": 2, "minus": 4} for n in "abcd"}}, "contrasts"),
        ({"contrasts": by("y", 4, 2)}, "design.contrasts.x.by.factor: 'y' is not valid; factors are"),
        ({"contrasts": by("layer_0", 4, 2)}, "name another factor than the contrast's own"),
        (
            {"contrasts": by("scale", "cubic", "sqrt")},
            "contrasts.x.by: 'cubic' is not valid; levels of scale",
        ),
        ({"contrasts": by("scale", "linear", "sqrt")}, "interactions of two other factors; take kind full"),
        (
            {"contrasts": by("scale", "linear", "sqrt"), "kind": "fractional", "runs": 64},
            "with each other, but not with main effects; take",
        ),
        ({"predict": {"x": "2,4,8,8"}}, "layers of layers_1-2 have one head count"),
        ({"predict": {"x": "3,4,4,8"}}, "design.predict.x: '3' is not valid; levels of layer_0 are"),
        ({"predict": {"x": {"layer_5": 2}}}, "design.predict.x: 'layer_5' is not valid"),
    ],
)
def test_bad_designs_are_one_line(design, said):
    keep = (
        {} if "factors" not in design else {"contrasts": {}, "predict": {}, "runs": 4, "kind": "orthogonal"}
    )
    with refused(said):
        study(**keep | design)


def test_a_bad_setting_of_a_level_names_the_variant():
    with refused("variant 3-4: heads"):
        study(kind="full", runs=4, factors={"layer_0": [3, 4], "layer_1": [2, 4]}, contrasts={}, predict={})


def test_combinations_come_in_a_random_order_that_is_always_the_same():
    factors = {f"layer_{layer}": [2, 4, 8, 16] for layer in range(4)}
    changes = {"kind": "full", "runs": 256, "factors": factors, "contrasts": {}, "predict": {}}
    first, again = ([*study(**changes).comparisons[0].variants] for _ in range(2))
    assert first == again != sorted(first) and len(set(first)) == 256
    for place in range(4):
        counts = Counter(name.split("-")[place] for name in first[:64])
        assert set(counts) == {"2", "4", "8", "16"} and min(counts.values()) > 6


def test_variants_and_a_design_are_refused_together():
    values = yaml.safe_load(DESIGN) | {"variants": {"a": {}}, "baseline": "a"}
    with refused("give either variants and a baseline, which is one of them, or a design"):
        parse_study(yaml.safe_dump(values), "it", Path("runs/it"))
