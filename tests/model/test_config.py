import dataclasses
import json
import math
from typing import Any

import pytest

from model.blocks import BLOCKS, block
from model.config import ModelConfig
from model.errors import UserError

SIZES = {"vocab_size": 260, "context_length": 64, "d_model": 48, "heads": (2, 3, 4), "ffn_width": 128}


def llama(**changes):
    return block("llama", **{**SIZES, **changes})


# What the message must hold: its beginning, and what else.
MUP = {"parametrization": "mup", "attention_scale": "none"}
BAD = {
    "heads: layer 1 has 5 heads … do not divide d_model 48; nearest valid: 4 or 6": {"heads": (2, 5, 4)},
    "heads: layer 0 has 16 heads … into even head dims; nearest valid: 12 or 24": {"heads": (16, 3, 4)},
    "heads: layer 0 has 100 … nearest valid: 24": {"heads": (100, 2, 2)},
    "heads: layer 0 has 47 … nearest valid: none": {"d_model": 47, "heads": (47,)},
    "heads: … at least 1 value": {"heads": ()},
    "heads: … at most 10,000 values": {"heads": (2,) * 10_001},
    "kv_heads: layer 1 has 2 … do not divide its 3 heads; nearest valid: 1 or 3": {"kv_heads": (2, 2, 4)},
    "kv_heads: 2 layers given, but heads has 3 … must have 3 values": {"kv_heads": (1, 1)},
    "head_dim: 4 layers given … must have 3 values": {"head_dim": (8, 8, 8, 8)},
    "head_dim: layer 1 has 7 … nearest valid: 6 or 8": {"head_dim": (8, 7, 8)},
    "local_window: 2 layers given … must have 3 values": {"local_window": (None, 8)},
    "ffn: 'swigul' … swiglu, mlp; did you mean 'swiglu'?": {"ffn": "swigul"},
    "attention_scale_base: missing … needs the head dim": {"attention_scale": "constant"},
    "attention_scale_base: … takes none; leave it out, or give null": {"attention_scale_base": 16},
    "rope_scaling.high_freq_factor: … give a number above low_freq_factor, 4": {
        "rope_scaling": dict.fromkeys(("low_freq_factor", "high_freq_factor", "factor"), 4.0)
        | {"type": "llama3", "original_context_length": 8}
    },
    "rope_scaling: no layer … leave it out": {
        "rope_base": None,
        "rope_scaling": {"type": "linear", "factor": 4},
    },
    "rope_scaling: … no wavelengths": {
        "positions": "learned",
        "rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4}
        | {"original_context_length": 8},
    },
    "rope_scaling.beta_fast: 2 … above beta_slow, 2": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 2,
            "original_context_length": 8,
            "beta_fast": 2,
            "beta_slow": 2,
        }
    },
    "rope_base: 1 … give a base above 1": {
        "rope_base": 1,
        "rope_scaling": {"type": "yarn", "factor": 2, "original_context_length": 8},
    },
    "rope_base: 2 layers given … must have 3 values": {
        "rope_base": (8.0, 16.0),
        "rope_scaling": {"type": "yarn", "factor": 2, "original_context_length": 8},
    },
    "base_width: missing … needs the d_model of its rates": {"parametrization": "mup"},
    "base_width: … takes none; leave it out": {"base_width": 16},
    "attention_scale: 'sqrt_head_dim' … head_dim or constant": {"parametrization": "mup", "base_width": 16},
    "base_width: 3073 is more than 64 times wider … valid: 1 to 3072": MUP | {"base_width": 3073},
    "base_width: 1 is more than 64 times narrower … valid: 2 to": MUP
    | {"base_width": 1, "d_model": 96, "heads": (1,)},
    "z_loss: … this is a classifier": {"z_loss": 1e-4, "classes": 2},
    "ffn_widht: unknown … did you mean 'ffn_width'?": {"ffn_widht": 3},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_one_clear_line(said):
    with pytest.raises(UserError) as caught:
        llama(**BAD[said])
    start, contains = said.split(" … ")
    assert str(caught.value).startswith(start) and contains in str(caught.value)
    assert "\n" not in str(caught.value)


SCALING = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_length": 16,
}
WRONG: list[tuple[str, list[Any]]] = [
    ("vocab_size context_length d_model", [0, -1, 2**31, 48.5, True, "48", None, math.nan]),
    (
        "rope_base rotary_share",
        [0, -1.0, math.inf, math.nan, True, "x", (), (1.0, -1.0, 1.0), "1,-1,1", "1.0.0"],
    ),
    ("rotary_share", [None, "null", "1,null,1", 1.5]),
    ("norm_eps init_std", [0, -1.0, math.inf, math.nan, True, "1", None]),
    ("norm_bias ffn_bias tie_embeddings", [1, "true", None]),
    ("ffn activation norm attention_bias positions attention_scale qk_norm parametrization", ["x", 1, None]),
    ("attention_gate", ["x", "heads", 1, None]),
    ("attention_scale_base logit_softcap", [0, -1.0, math.inf, True, "1"]),
    ("base_width", [0, 48.5, True, "48"]),
    ("z_loss", [-1.0, math.nan, True, "1", None]),
    ("rope_scaling", [1, "llama3", [], SCALING | {"type": "longrope"}, SCALING | {"factor": 0}]),
    ("ffn_width", [-1, 2**31, 48.5, True, "x", None, math.nan, (), (48, -1, 48), (48, 1.0, 48)]),
    ("block_width", [0, -1, 2**31, 48.5, True, "x", math.nan, (), (48, 0, 48)]),
    ("heads", [8]),
    ("kv_heads head_dim local_window", [-1, 8.0, True]),
    ("heads kv_heads head_dim local_window", [(2, -1, 4), [2, True, 4], (2, 4.0, 2), (2, 2**31, 4), "x"]),
    ("classes", [1, 2.0, True, "3", 2**31]),
]
WRONG_VALUES: dict[str, list[Any]] = {}
for _names, _values in WRONG:
    for _name in _names.split():
        WRONG_VALUES[_name] = WRONG_VALUES.get(_name, []) + _values


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ModelConfig)])
def test_every_field_refuses_what_is_outside_its_declaration_in_one_line(name):
    for value in WRONG_VALUES[name]:
        for make in (llama, lambda **changes: ModelConfig(**{**SIZES, **changes})):
            with pytest.raises(UserError) as caught:
                make(**{name: value})
            place, _, said = str(caught.value).partition(": ")
            assert place.split(".")[0] in (name, "heads") and "\n" not in said, value
            assert "is not valid; give " in said


def test_summary():
    config = llama(heads="2,4x2", kv_heads="1x3", head_dim="8x3", local_window=(None, 8, 8), classes=3)
    assert config.summary() == (
        f"{config.num_parameters():,} parameters, 3 layers, heads 2,4x2 ▄██, 3 classes, KV heads 1x3, "
        "head dim 8x3, attention windows all,8,8, d_model 48, context 64"
    )
    assert "KV" not in llama().summary() and "windows" not in llama().summary()
    assert "FFN width 0x3" in llama(heads=(2, 3, 4), ffn_width=0).summary()
    positions = llama(heads=(2, 3, 4), rope_base="1e6,null,1e4", rotary_share=(0.5, 1, 0.5)).summary()
    assert "rotary base 1e+06,null,10000, rotary share 0.5,1,0.5, d_model" in positions
    assert "rotary" not in llama(rope_base=500.0).summary()


FLOATS = {
    "0.5,1,0.25": (0.5, 1.0, 0.25),
    "0.5,1x2": (0.5, 1.0, 1.0),
    " [ 5e-1x2 , .25 ] ": (0.5, 0.5, 0.25),
    "1.x3": 1.0,
    "0.5": 0.5,
}


@pytest.mark.parametrize("text", FLOATS)
def test_schedules_of_fractions_are_text_too(text):
    assert llama(heads=(1, 2, 3), rotary_share=text).rotary_share == FLOATS[text]


def test_a_share_may_have_the_digits_that_an_error_shows():
    """Of twelve dims a third, as written."""
    with pytest.raises(UserError, match=r"nearest valid: 0\.333333 or 0\.5"):
        llama(heads=(4, 4, 4), rotary_share=0.4)
    assert llama(heads=(4, 4, 4), rotary_share=0.333333).layer_rotary(0) == (4, 10000.0)


@pytest.mark.parametrize("given", [2, "2", [2], "2x4"])
def test_one_value_is_that_of_all_layers(given):
    """Key/value heads only where there is attention."""
    values = {"vocab_size": 100, "context_length": 16, "d_model": 32, "ffn_width": 64, "heads": "4x3,0"}
    config = ModelConfig.from_json(values | {"local_window": given, "head_dim": given})
    assert config.local_window == config.head_dim == (2,) * 4
    if given != "2x4":
        assert ModelConfig.from_json(values | {"kv_heads": given}).kv_heads == (2, 2, 2, 0)
    assert ModelConfig.from_json(config.to_json()) == config


def test_no_positions_in_any_layer():
    """One value for all layers, in every spelling."""
    for given in (None, "null", "nullx3", (None, None, None)):
        config = llama(heads=(2, 3, 4), rope_base=given)
        assert config.rope_base is None and not config.rotary_kinds
        assert ModelConfig.from_json(config.to_json()) == config
    assert llama(heads=(2, 3, 4), rope_base="1e6,null,10000.5").rope_base == (1e6, None, 10000.5)


def test_a_schedule_of_zeros_is_no_hexadecimal_number():
    assert llama(ffn_width="0x2,64").ffn_width == (0, 0, 64)


LAYERS = [
    ("block_width", "48,0,24", "'48,0,24' is not valid; give a number from 1 in layer 1, which has 0"),
    ("ffn_width", [64, -1, 0], "[64, -1, 0] is not valid; give a number from 0 in layer 1, which has -1"),
    ("kv_heads", "1,2.5", "'1,2.5' is not valid; give n or nxN with whole numbers"),
    ("rope_base", "1e4,1e13,1", "'1e4,1e13,1' is not valid; give at most 1e+12 in layer 1, which has 1"),
    ("rotary_share", (0.5, 0, 1), "(0.5, 0, 1) is not valid; give a number above 0 in layer 1, which has 0"),
    ("local_window", [3, 0, None], "[3, 0, None] is not valid; give a number from 1 in layer 1, which has 0"),
]


@pytest.mark.parametrize(("name", "given", "said"), LAYERS)
def test_a_message_names_the_field_and_the_layer(name, given, said):
    with pytest.raises(UserError) as caught:
        ModelConfig(**{**SIZES, "heads": (2, 3, 4), name: given})
    assert str(caught.value).startswith(f"{name}: {said}")


def test_unknown_block_and_missing_field():
    with pytest.raises(UserError, match=r"block: 'lama' is unknown.*did you mean 'llama'"):
        block("lama", **SIZES)
    with pytest.raises(UserError, match="d_model: missing"):
        block("llama", vocab_size=5, context_length=5, heads=(1,))


def test_odd_head_dim_is_fine_without_rotary_positions_and_given_head_dim_need_not_divide():
    assert llama(heads=(16, 3, 4), positions="learned").layer_head_dim(0) == 3
    config = llama(heads=(5, 7, 1), head_dim=(6, 8, 10))
    assert [config.attention_width(layer) for layer in range(3)] == [30, 56, 10]


def test_shapes_of_a_layer():
    config = llama(heads=(4, 6, 2), kv_heads=(2, 3, 1))
    assert config.num_layers == 3
    assert [config.layer_head_dim(layer) for layer in range(3)] == [12, 8, 24]
    assert [config.layer_kv_heads(layer) for layer in range(3)] == [2, 3, 1]
    assert [config.attention_width(layer) for layer in range(3)] == [48, 48, 48]
    assert [config.kv_width(layer) for layer in range(3)] == [24, 24, 24]
    assert llama().layer_kv_heads(1) == 3 and llama().layer_window(1) is None


def test_vocabulary_is_padded_to_the_lcm_of_128_and_the_tensor_parallel_degree():
    config = llama(vocab_size=50257)
    assert {config.padded_vocab_size(2**power) for power in range(8)} == {50304}
    assert config.padded_vocab_size(3) == 50304  # 131 * 384
    assert config.padded_vocab_size(5) == 50560  # 79 * 640
    assert llama(vocab_size=128).padded_vocab_size() == 128


def test_parameter_count_by_hand_with_every_switch_on():
    sizes = {"vocab_size": 100, "context_length": 10, "d_model": 12, "ffn_width": 20}
    schedules = {"heads": (2, 3), "kv_heads": (1, 3), "head_dim": (4, 6)}
    config = block("gpt2", **sizes, **schedules, ffn="swiglu", tie_embeddings=False)
    layer_0 = 12 * 8 + 12 * 4 + 12 * 4 + 8 * 12  # q, k, v, o: A = 2 * 4, kv width = 1 * 4
    layer_0 += 8 + 4 + 4 + 12  # their biases
    layer_1 = 4 * 12 * 18 + 18 + 18 + 18 + 12  # A = kv width = 3 * 6
    shared = 3 * 12 * 20 + 20 + 20 + 12 + 2 * (12 + 12)  # gated feed-forward with biases, two norms
    outside = 10 * 12 + (12 + 12) + 100 * 12  # positions, final norm, LM head
    assert config.num_parameters() == layer_0 + layer_1 + 2 * shared + outside + 100 * 12
    assert config.num_parameters(padded=True) == config.num_parameters() + 2 * 28 * 12  # 128 rows, twice
    only_output = config.replace(attention_bias="output", ffn_bias=False)
    assert config.num_parameters() - only_output.num_parameters() == (8 + 4 + 4) + 3 * 18 + 2 * (20 + 20 + 12)


def test_flops_by_hand():
    # Matrices per layer: 4 * 48 * 48 + 3 * 48 * 128; the head has 260 rows; attention sees all 64 positions.
    expected = 6 * (3 * (4 * 48 * 48 + 3 * 48 * 128) + 260 * 48) + 12 * 3 * 64 * 48
    assert llama().flops_per_token() == expected
    assert llama(tie_embeddings=False).flops_per_token() == expected
    # A window of 16 in the middle layer hides 48 positions; one of 100 hides nothing.
    assert llama(local_window=(None, 16, 100)).flops_per_token() == expected - 12 * 48 * 48
    # Given head dims change the width of attention and of its matrices: A = 2 * 10 in the first layer.
    changed = llama(head_dim=(10, 16, 12))
    assert changed.flops_per_token() == expected - 6 * 4 * 48 * 28 - 12 * 64 * 28


def test_counts_of_element_gates_and_of_query_norms():
    shape = {"heads": (5, 7, 1), "head_dim": (6, 8, 10)}
    plain, gated = llama(**shape), llama(**shape, attention_gate="element")
    assert gated.num_parameters() - plain.num_parameters() == 48 * (30 + 56 + 10)
    assert gated.flops_per_token() - plain.flops_per_token() == 6 * 48 * (30 + 56 + 10)
    normed = llama(**shape, qk_norm="weighted")
    assert normed.num_parameters() - plain.num_parameters() == 2 * (6 + 8 + 10)


def test_flops_of_a_classifier_have_its_own_head():
    assert llama().flops_per_token() - llama(classes=3).flops_per_token() == 6 * (260 - 3) * 48


@pytest.mark.parametrize("name", list(BLOCKS))
def test_json_round_trip(name):
    config = block(name, **SIZES)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert hash(config) == hash(ModelConfig.from_json(config.to_json()))


def test_gptneo_alternates_windows_unless_told():
    assert block("gptneo", **SIZES).local_window == (None, 256, None)
    assert block("gptneo", **{**SIZES, "heads": "2,3,4"}).local_window == (None, 256, None)
    assert block("gptneo", **SIZES, local_window=None).local_window is None


def test_replace_and_difference():
    config = llama()
    other = config.replace(heads="4x3", norm_eps=1e-6, local_window=[None, 8, None])
    assert config.difference(config) == []
    assert config.difference(other) == [
        "heads: 2,3,4 != 4x3",
        "norm_eps: 1e-05 != 1e-06",
        "local_window: None != [None, 8, None]",
    ]
    with pytest.raises(UserError, match="head: unknown; did you mean 'heads'"):
        config.replace(head=(1,))


def test_layers_without_a_part():
    """Counted by hand: a gated layer without attention, one without a feed-forward network, one with both."""
    config = llama(
        heads=(0, 3, 4), ffn_width=(96, 0, 32), kv_heads=(0, 1, 4), norm_bias=True, attention_gate="head"
    )
    d = config.d_model
    attention = [0, (2 + 2 / 3) * d * d / 1, 4 * d * d]
    assert config.attention_layers == (1, 2) and config.residual_writes == 4
    assert [config.layer_head_dim(layer) for layer in range(3)] == [0, d // 3, d // 4]
    matrices = sum(attention) + (3 + 4) * d + 3 * d * (96 + 32)
    assert config.num_parameters() == matrices + (4 + 1) * 2 * d + config.vocab_size * d
    visible = 2 * d * config.context_length  # attention of two layers
    assert config.flops_per_token() == 6 * (matrices + config.vocab_size * d) + 12 * visible
    assert config.summary().endswith("FFN width 96,0,32, attention gate head, d_model 48, context 64")


def test_layers_of_different_widths():
    """Counted by hand: wider and narrower layers than the embeddings, whose heads divide their own width."""
    config = llama(heads=(4, 2, 0), block_width=(72, 24, 36), ffn_width=(80, 0, 64), ffn_bias=True)
    assert [config.layer_head_dim(layer) for layer in range(3)] == [18, 12, 0]
    assert (config.stream_width, config.replace(block_width=(24, 24, 36)).stream_width) == (72, 48)
    matrices = 4 * 72 * 72 + 3 * 72 * 80 + 4 * 24 * 24 + 3 * 36 * 64
    biases = (2 * 80 + 72) + (2 * 64 + 36)
    norms = 2 * 72 + 24 + 36 + 48
    assert config.num_parameters() == matrices + biases + norms + 260 * 48
    assert config.flops_per_token() == 6 * (matrices + 260 * 48) + 12 * config.context_length * (72 + 24)
    assert config.summary().endswith("FFN width 80,0,64, block width 72,24,36, d_model 48, context 64")
    assert llama(block_width=(48, 48, 48)) == llama(block_width=48) == llama()
    assert llama(block_width="72x3").block_width == 72
    mup = {"parametrization": "mup", "base_width": 24, "attention_scale": "none"}
    ratios = config.replace(**mup)
    assert [ratios.layer_ratio(layer) for layer in range(3)] == [3, 1, 1.5] and ratios.width_ratio == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_width": (48, 48)}, "block_width: 2 layers given, but heads has 3"),
        (
            {"block_width": (48, 36, 20)},
            "heads: layer 1 has 4 heads, which do not divide its block_width 36 into",
        ),
        (
            {"block_width": (48, 8, 1600), "parametrization": "mup", "base_width": 24, "heads": (4, 2, 4)}
            | {"attention_scale": "none"},
            "base_width: 24 is more than 64 times narrower than block_width (layer 2) 1600; valid: 25 to",
        ),
        ({"heads": (0, 4, 4), "ffn_width": (0, 8, 8)}, "heads: layer 0 has neither heads nor a feed-forward"),
        (
            {"heads": (4, 0, 4), "kv_heads": (4, 2, 4)},
            "kv_heads: layer 1 has 2 key/value heads, and no heads",
        ),
        ({"kv_heads": (4, 0, 4)}, "kv_heads: layer 1 has 0 key/value heads, which do not divide its 4 heads"),
        ({"head_dim": (8, 0, 8)}, "head_dim: layer 1 has 0, and 4 heads; give a number above 0"),
        ({"ffn_width": (8, 8)}, "ffn_width: 2 layers given, but heads has 3"),
        ({"ffn_width": (8,)}, "ffn_width: 1 layers given, but heads has 3"),
        ({"rope_base": (8.0,)}, "rope_base: 1 layers given, but heads has 3"),
        ({"rotary_share": 0.4}, "rotary_share: layer 0 rotates 0.4 of a head dim of 12, 4.8 of its"),
        ({"rotary_share": 1e-11}, "rotary_share: layer 0 rotates 1e-11 of a head dim of 12"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(UserError) as caught:
        llama(**{"heads": (4, 4, 4)} | changes)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_nearest_head_counts_go_with_the_rotary_share():
    """Of a width of 48: 8 heads have a head dim of 6, half of which is odd."""
    for share, nearest in ((1.0, "6 or 8"), (0.5, "6 or 12")):
        with pytest.raises(UserError, match=f"layer 0 has 7 heads.*; nearest valid: {nearest}$"):
            llama(heads=(7, 4, 4), rotary_share=share)


def test_nearest_head_counts_go_with_the_key_value_heads():
    with pytest.raises(UserError, match=r"layer 0 has 7 heads.*; nearest valid: 4 or 8$"):
        llama(heads=(7, 4, 4), kv_heads=(4, 4, 4))  # 6 would be nearer
