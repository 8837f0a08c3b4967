"""Allocations of a width over depth: the papers' shapes, their budget, and what is no allocation."""

import math
import re

import pytest

from model.allocations import MULTIPLE, PROFILES, parse_allocation, round_to_budget, variable_widths
from model.config import ModelConfig
from model.errors import UserError
from model.presets import preset


def widths(text, layers):
    return parse_allocation(text).widths(layers)


def test_tapered_is_the_papers_cosine():
    expected = [512 + 1024 * (1 + math.cos(math.pi * layer / 5)) / 2 for layer in range(6)]
    assert widths("tapered(1024, multiple=1)", 6) == tuple(math.floor(value + 0.5) for value in expected)
    assert widths("tapered(2048)", 12)[0] == 3072 and widths("tapered(2048)", 12)[-1] == 1024
    # Also where errors of rounding are equal, so that either layer could have the remainder.
    for given, layers in (("2048", 12), ("384", 4), ("2736, multiple=16", 16), ("576", 24)):
        assert widths(f"late({given})", layers) == widths(f"tapered({given})", layers)[::-1]


def test_middle_and_ends_are_complements():
    assert widths("middle(70)", 10) == (0,) * 1 + widths("middle(70)", 10)[1:8] + (0,) * 2
    assert widths("middle(70, multiple=1)", 10) == (0, *(100,) * 7, 0, 0)
    assert widths("ends(60, multiple=1)", 10) == (200, *(0,) * 7, 200, 200)


@pytest.mark.parametrize(
    ("mean", "d_model", "layers"), [(576, 640, 16), (855, 960, 24), (1145, 1280, 32), (1426, 1600, 40)]
)
def test_variable_widths_are_those_of_the_paper(mean, d_model, layers):
    """Its table of mean widths; the widths of its smallest model from its code's configuration."""
    found = variable_widths(d_model, layers)
    assert round(sum(found) / layers) == mean
    if layers == 16:
        assert found == (1152, 960, 832, 704, 608, 512, 448, 352, 320, 256, 224, 192, 288, 480, 736, 1152)


def test_block_widths_keep_the_parameters_of_the_uniform_model():
    """Of the paper's Transformer: 16 heads, an FFN of 4 w, no biases; less what is never read or written."""
    uniform = ModelConfig(1000, 64, 640, (16,) * 16, 4 * 640)

    def matter(model):
        wide = [width for width in model.block_widths if width > 640]
        lost = 3 * wide[0] * (wide[0] - 640) + 4 * wide[-1] * (wide[-1] - 640) if wide else 0
        norms = sum(2 * (width - 640) for width in model.block_widths)
        return model.num_parameters() - lost - norms

    def built(text):
        widths = uniform.replace(block_width=text, ffn_width=64, heads=(1,) * 16).block_widths
        return uniform.replace(block_width=widths, ffn_width=tuple(4 * width for width in widths))

    waist = built("waist(640, multiple=32)")
    assert waist.block_widths == variable_widths(640, 16) and waist.stream_width == 1152
    for text in ("waist(640, multiple=32)", "tapered(640, multiple=32)", "openelm(640, multiple=32)"):
        assert matter(built(text)) == pytest.approx(uniform.num_parameters(), rel=0.01), text
    mixed = uniform.replace(block_width="permuted(waist(640, multiple=32), seed=2)").block_widths
    assert mixed != waist.block_widths and sorted(mixed) == sorted(waist.block_widths)
    assert uniform.replace(block_width="uniform(640)") == uniform
    for text in ("middle(640)", "waist(640, turn=0.01)"):
        with pytest.raises(UserError, match=r"^block_width: .*; give "):
            uniform.replace(block_width=text)


def test_block_widths_of_a_stream_that_is_wider_than_the_embeddings():
    """What lies beyond d_model is not counted, of the uniform model neither."""
    uniform = ModelConfig(1000, 64, 128, (1,) * 16, 4 * 256, block_width=256)

    def matter(model):
        first, *_, last = model.block_widths
        lost = 3 * first * max(0, first - 128) + 4 * last * max(0, last - 128)
        return model.num_parameters() - lost - 2 * sum(model.block_widths)

    for text in ("waist(256, multiple=2)", "tapered(256, multiple=2)"):
        widths = uniform.replace(block_width=text).block_widths
        model = uniform.replace(block_width=widths, ffn_width=tuple(4 * width for width in widths))
        assert matter(model) == pytest.approx(matter(uniform), rel=0.001), text
        assert not parse_allocation(text, blocks=True).describe_excess(widths, 128)


SIZES = ["124m", "354m", "757m", "micro", "tiny"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROFILES)
def test_every_shape_of_heads_keeps_the_budget(name, size):
    """Of head dims that are the same in every layer: heads then have equally many parameters."""
    uniform = preset(f"uniform-{size}")
    count, layers = uniform.heads[0], uniform.num_layers
    given = {"head_dim": [uniform.layer_head_dim(0)] * layers}
    model = uniform.replace(heads=f"{name}({count}, layers={layers})", **given)
    assert sum(model.heads) == count * layers and (name == "uniform" or len(set(model.heads)) > 1)
    absent = uniform.d_model * model.heads.count(0)  # of the norms
    assert uniform.num_parameters() - model.num_parameters() == absent


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROFILES)
def test_every_shape_keeps_the_budget(name, size):
    """At the papers' scales with the default multiple, at the small ones with 16."""
    uniform = preset(f"uniform-{size}")
    multiple = MULTIPLE if size.endswith("4m") or size == "757m" else 16
    mean = uniform.layer_ffn_width(0)
    for text in (
        f"{name}({mean}, multiple={multiple})",
        f"permuted({name}({mean}, multiple={multiple}), seed=3)",
    ):
        model = uniform.replace(ffn_width=text)
        assert all(width % multiple == 0 for width in model.ffn_widths)
        error = sum(model.ffn_widths) - model.num_layers * mean
        assert error == 0 if model.num_layers * mean % multiple == 0 else abs(error) <= multiple / 2
        norms = uniform.d_model * (2 * model.num_layers - model.residual_writes)
        difference = model.num_parameters() - uniform.num_parameters()
        assert difference == 3 * model.d_model * error - norms
    assert sorted(model.ffn_widths) == sorted(
        widths(f"{name}({mean}, multiple={multiple})", model.num_layers)
    )


def test_the_remainder_goes_to_the_largest_errors_of_rounding():
    # 1.4, 1.4, 0.2 units: rounded to 1, 1 and at least 1.
    assert round_to_budget([1.4, 1.4, 0.2], 10, 10) == [10, 10, 10]
    # 2.4, 2.3, 0.3 units of 10, rounded to 2, 2, 1: the sum is as it should be.
    assert round_to_budget([2.4 / 5 * 3, 2.3 / 5 * 3, 0.3 / 5 * 3], 50 / 3, 10) == [20, 20, 10]
    # 1.6, 1.6, 0.8: rounded to 2, 2, 1, one too much: the first of the two largest gives.
    assert round_to_budget([1.2, 1.2, 0.6], 40 / 3, 10) == [10, 20, 10]


def test_a_layer_of_one_multiple_may_get_the_remainder():
    # 1.4, 1.4, 1.2 units of 10: rounded to 1 each, one too few.
    assert round_to_budget([1.05, 1.05, 0.9], 40 / 3, 10) == [20, 10, 10]


def test_a_permutation_depends_on_its_seed():
    one, other = (widths(f"permuted(tapered(2048), seed={seed})", 12) for seed in (1, 2))
    assert one == widths("permuted(tapered(2048), seed=1)", 12) != other


def test_one_meaning():
    uniform = preset("uniform-124m")
    by_name, by_list = (
        uniform.replace(ffn_width=given) for given in ("tapered(2048)", widths("tapered(2048)", 12))
    )
    assert by_name == by_list == ModelConfig.from_json(by_name.to_json())
    assert uniform.replace(ffn_width="uniform(2048)") == uniform == uniform.replace(ffn_width="2048x12")
    heads = uniform.replace(heads="openelm(12, layers=12, end=1.0)", head_dim="64x12").heads
    assert sum(heads) == 144 and list(heads) == sorted(heads)


WRONG = {
    "prism(7": "it is no NAME(MEAN)",
    "tapred(3)": "'tapred' is unknown; give one of uniform, tapered",
    "tapered()": "the mean of the layers comes first",
    "tapered(1.5)": "the mean of the layers comes first",
    "permuted(permuted(tapered(64)))": "permuted is given twice; write it once",
    "permuted(tapered(64), 3)": "permuted takes one allocation and a seed, such as permuted",
    "permuted(tapered(64, seed=3))": "seed is for permuted, such as permuted(tapered(2048), seed=1)",
    "tapered(64, stat=1)": "stat is unknown; give layers, multiple, start, end; did you mean 'start'?",
    "tapered(64, start=-1)": "start is not a number from 1e-06",
    "tapered(64, layers=3)": "layers=3, and the model has 12",
    "permuted(3)": "it is no NAME(MEAN)",
    "permuted(tapered(64), seed=1.5)": "seed is not a whole number from 0",
    "tapered(32)": "its mean is below the multiple of the widths, 64; give multiple=32 or less",
    "ends(64, share=1)": "share: 1 is not valid for 12 layers; give a number from 0.0833 to 0.917",
    "middle(64, share=5)": "share: 5 is not valid for 12 layers; give a number from 0.0833 to 0.917",
    "waist(64, turn=3)": "turn: 3 is not valid for 12 layers; give a number from 0.167 to 0.917",
    "waist(64, turn=0.1)": "turn: 0.1 is not valid for 12 layers; give a number from 0.167 to 0.917",
    "waist(64, depth=3)": "depth: 3 is not valid; give a number below 1",
    "__import__('os').getcwd()": "it is no NAME(MEAN)",
    "tapered(*[64])": "the mean of the layers comes first",
    "(" * 5000: "it is no NAME(MEAN)",
}


@pytest.mark.parametrize("text", WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_what_is_no_allocation_is_refused_in_one_line(text):
    with pytest.raises(UserError) as caught:
        preset("uniform-124m").replace(ffn_width=text)
    said = str(caught.value)
    assert said.startswith("ffn_width: ") and WRONG[text] in said and "\n" not in said
    with pytest.raises(UserError, match="heads: 'tapered\\(8\\)' is not valid; how many layers"):
        preset("uniform-124m").replace(heads="tapered(8)")


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 12, 16, 40])
@pytest.mark.parametrize(("shape", "name"), [("middle", "share"), ("ends", "share"), ("waist", "turn")])
def test_the_range_that_a_message_gives_is_that_of_the_shape(layers, shape, name):
    with pytest.raises(UserError) as caught:
        widths(f"{shape}(640, multiple=1, {name}=5)", layers)
    found = re.fullmatch(
        rf"{name}: 5 is not valid for {layers} layers; give a number from (.*) to (.*)", str(caught.value)
    )
    if not found:
        assert re.fullmatch(
            rf"{name}: needs (2|3) layers or more, and there are {layers}; .*", str(caught.value)
        )
        assert layers < 3
        return
    for bound in found.groups():
        assert len(set(widths(f"{shape}(640, multiple=1, {name}={bound})", layers))) > 1
    for outside in (float(found[1]) - 0.6 / layers, float(found[2]) + 0.6 / layers):
        with pytest.raises(UserError, match=name):
            widths(f"{shape}(640, multiple=1, {name}={max(outside, 1e-6)})", layers)
