"""Study files: what they ask for, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from model.errors import UserError
from model.heads import parse_heads
from pretrain.study.study_file import find_study, parse_study, read_study, study_names
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
    assert (
        run.optimizer.learning_rate == 1e-3 and run.optimizer.weight_decay == 0.0
    )  # the study's, the variant's
    assert run.optimizer.gradient_clipping == 1.0 and run.vocab_size == 2048  # the recipe's
    model = run.build_model_config()
    assert (model.d_model, model.ffn_width, model.heads) == (64, 192, (1, 2, 4, 4))
    assert run.recipe == "micro" and str(run.folder) == "runs/s/prism-s4"


def test_a_seed_is_complete_before_the_next():
    assert [planned.name for planned in study().runs] == ["uniform-s4", "prism-s4", "uniform-s7", "prism-s7"]
    assert [planned.run.seed for planned in study().runs] == [4, 4, 7, 7]
    assert study(changed(seeds=3)).file.seeds == [1, 2, 3]


def test_comparisons_have_recipes_and_baselines_of_their_own():
    found = study("""
seeds: 1
settings: {steps: 10, validation: {every: 5}}
comparisons:
  small:
    recipe: micro
    baseline: a
    variants: {a: {heads: 8x4}, b: {heads: 4x4}, c: {heads: 2x4, against: b}}
  large: {recipe: tiny, settings: {steps: 20}, baseline: a, variants: {a: {}, b: {model: uniform-tiny}}}
""")
    names = [planned.name for planned in found.runs]
    assert names == [f"{variant}-s1" for variant in ("small-a", "small-b", "small-c", "large-a", "large-b")]
    assert [planned.run.steps for planned in found.runs] == [10, 10, 10, 20, 20]
    assert all(planned.run.validation.every == 5 for planned in found.runs)
    small = found.comparisons[0]
    assert [small.baseline_of(name) for name in "abc"] == ["a", "a", "b"]


def test_other_seeds_are_another_run_of_the_same_pair():
    found = study(changed(variants={"uniform": {}, "again": {"seed_shift": 100}}))
    assert [(p.variant, p.seed, p.run.seed) for p in found.runs][:2] == [("uniform", 4, 4), ("again", 4, 104)]


BAD_VALUES = [
    ("baseline: unifrom", "baseline: 'unifrom' is not valid; it must be one of the variants: uniform, prism"),
    ("baseline:", "give either variants and a baseline"),
    (
        "variants: {uniform: {haeds: 4x4}}",
        "study: variants.uniform: haeds: unknown key; did you mean 'heads'",
    ),
    ("variants: {uniform: {heads: 5x4}}", "variant uniform: heads"),
    ("variants: {uniform: {seed: 3}}", "variants.uniform.seed: not a setting"),
    ("variants: {uniform: {}, b: {heads: 2x4, against: x}}", "variants.b.against: 'x' is not valid"),
    ("variants: {uniform: {against: b}, b: {heads: 2x4}}", "uniform.against: 'b' is not valid"),
    ("{variants: {a/b: {}}, baseline: a/b}", "variants: 'a/b' is not valid; give names that can be part"),
    ("settings: {model: prism-unknown}", "no preset 'prism-unknown'"),
    ("recipe: mirco", "recipe: no recipe or file 'mirco'"),
    ("seeds: [1, 1]", "seeds: [1, 1] is not valid; give a list such as [1, 2, 3], each once"),
    ("seeds: 0", "seeds: 0 is not valid; give a list such as [1, 2, 3]"),
    ("last_validations: 9", "measure: 'val_loss' is not valid; variant uniform measures it 1 times"),
    ("measure: val_accuracy", "measure: 'val_accuracy' is not valid; variant uniform measures it 0 times"),
    ("settings: {validation: {every: 0}}", "'val_loss' is not valid; variant uniform measures it 0 times"),
    ("{recipe: classification, measure: val_bpb}", "variant uniform measures it 0 times"),
    ("vairants: {}", "vairants: unknown; did you mean 'variants'?"),
    ("comparisons: {a: {baseline: b, variants: {b: {}}}}", "give either variants and a baseline"),
]


@pytest.mark.parametrize(("values", "said"), BAD_VALUES)
def test_bad_values_are_one_line(values, said):
    with refused(said):
        study(changed(**yaml.safe_load(values)))


def test_a_variant_may_have_any_name():
    found = study("seeds: 1\nbaseline: 8\nvariants: {8: {heads: 8x4}, None: {heads: 4x4}, b: {}}\n")
    assert list(found.comparisons[0].variants) == ["8", "None", "b"]
    assert found.comparisons[0].baseline_of("b") == "8"


def test_a_variant_given_twice_is_refused_and_not_lost():
    with pytest.raises(UserError, match="'uniform' twice"):
        study(SMALL + "  uniform: {heads: 2x4}\n")


def test_two_runs_that_would_share_a_folder_are_refused():
    with pytest.raises(UserError) as refused:
        study("""
seeds: 1
comparisons:
  a: {baseline: b-c, variants: {b-c: {heads: 8x4}}}
  a-b: {baseline: c, variants: {c: {heads: 4x4}}}
""")
    assert str(refused.value) == (
        "study: variants: 'a-b.c' is not valid; it would share the folder a-b-c-s1 with a.b-c"
    )


CONTRASTED = """
seeds: 1
settings: {steps: 10}
comparisons:
  small: {recipe: micro, baseline: a, variants: {a: {heads: 8x4}, b: {heads: 4x4}, c: {heads: 2x4}}}
  large: {recipe: tiny, baseline: a, variants: {a: {}, b: {model: uniform-tiny}}}
contrasts: {"c - b": {plus: [c], minus: [small.b]}, all: {plus: ["*.b", c], minus: "*.a"}}
"""


def test_contrasts_name_variants_of_any_comparison():
    one, other = study(CONTRASTED).contrasts
    assert (one.name, one.plus, one.minus) == ("c - b", (("small", "c"),), (("small", "b"),))
    assert other.plus == (("small", "b"), ("large", "b"), ("small", "c"))
    assert other.minus == (("small", "a"), ("large", "a"))
    assert one.formula == "small.c − small.b"
    assert other.formula == "mean of (small.b, large.b, small.c) − mean of (small.a, large.a)"


BAD_CONTRASTS = [
    ("[1]", "contrasts: [1] is not valid; give a mapping"),
    ("{x: {plus: [small.d], minus: [c]}}", "contrasts.x.plus: 'small.d' is not valid; did you mean"),
    ("{x: {plus: [a], minus: [c]}}", "'a' is not valid; several comparisons have it; give small.a or"),
    ("{x: {plus: [c], minus: ['small.*']}}", "contrasts.x: 'small.c' is not valid; it is named twice"),
    ("{x: {plus: ['z.*'], minus: [c]}}", "x.plus: 'z.*' is not valid; "),
    ("{' ': {plus: [c], minus: [small.b]}}", "contrasts: ' ' is not valid"),
]


@pytest.mark.parametrize(("contrasts", "said"), BAD_CONTRASTS)
def test_bad_contrasts_are_one_line(contrasts, said):
    with refused(said):
        study(
            yaml.safe_dump(
                {**yaml.safe_load(CONTRASTED), "contrasts": yaml.safe_load(contrasts)}, sort_keys=False
            )
        )


def test_an_unknown_study_names_the_closest():
    with pytest.raises(UserError, match="did you mean 'direction-small'"):
        find_study("direction-smal")


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_comes_along_is_valid(name):
    found = read_study(find_study(name))
    assert found.title != name and found.file.machine
    # A level of a design is in many runs of each seed.
    assert len(found.file.seeds) >= 3 or all(comparison.design for comparison in found.comparisons)
    if name.endswith("-small"):
        assert found.file.hours and all(planned.run.data == "builtin" for planned in found.runs)


def heads_of(found, comparison):
    return {
        planned.variant: planned.run.build_model_config().heads
        for planned in found.of_first_seed
        if planned.comparison == comparison
    }


@pytest.mark.parametrize("name", ["direction", "direction-small"])
def test_direction_compares_one_multiset_and_contrasts_ascending_with_all_others(name):
    found = read_study(find_study(name))
    for comparison in found.comparisons:
        heads = heads_of(found, comparison.name)
        ordered = {heads[order] for order in ("ascending", "descending", "shuffled-a", "shuffled-b")}
        assert len(ordered) == 4 and len({tuple(sorted(each)) for each in ordered}) == 1
        assert list(heads["ascending"]) == sorted(heads["ascending"])
        uniform = [schedule[0] for name, schedule in heads.items() if name.startswith("uniform")]
        mean = sum(heads["ascending"]) / len(heads["ascending"])
        assert set(heads[comparison.baseline]) == {min(uniform, key=lambda count: abs(count - mean))}
        assert min(uniform) < mean < max(uniform)
        pairs = {
            (contrast.plus[0][1], contrast.minus[0][1])
            for contrast in found.contrasts
            if {scale for scale, _ in contrast.variants} == {comparison.name} and len(contrast.variants) == 2
        }
        # Beside those with the baseline, which are its differences.
        others = comparison.variants.keys() - {"ascending", comparison.baseline}
        assert pairs == {("ascending", other) for other in others}


@pytest.mark.parametrize("scale", ["354m", "757m"])
def test_head_progression_has_the_uniform_counts_on_both_sides_of_the_mean(scale):
    found = read_study(find_study("head_progression"))
    heads = heads_of(found, scale)
    mean = sum(heads["ascending"]) / len(heads["ascending"])
    uniform = sorted(schedule[0] for name, schedule in heads.items() if name.startswith("uniform"))
    width = next(p for p in found.runs if p.comparison == scale).run.build_model_config().d_model
    valid = [count for count in range(1, 17) if width % count == 0 and width // count % 2 == 0]
    assert uniform[0] < mean < uniform[1] == 16 and valid[-2:] == uniform


@pytest.mark.parametrize("name", ["learning_less", "learning_less-small", "learning_less-700m"])
def test_learning_less_contrasts_halves_of_the_blocks(name):
    found = read_study(find_study(name)).contrasts
    assert len(found) == 5
    assert {len(side) for contrast in found for side in (contrast.plus, contrast.minus)} == {16}


def test_the_small_ablation_has_the_papers_head_counts():
    small, full = (heads_of(read_study(find_study(f"prism_ablation{scale}")), "") for scale in ("-small", ""))
    assert small == full and len(small) == 9
    assert list(small.values())[7] == parse_heads("3x2,6x2,8x2,12x6")
