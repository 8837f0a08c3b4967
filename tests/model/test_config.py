import dataclasses
import json

import pytest

from model.config import BLOCKS, ModelConfig, block
from model.errors import UserError

SIZES = {"vocab_size": 260, "context_length": 64, "d_model": 48, "heads": (2, 3, 4), "ffn_width": 128}


def llama(**changes):
    return block("llama", **{**SIZES, **changes})


# (changes, what the message must begin with, what else it must contain)
BAD = [
    ({"heads": (2, 5, 4)}, "heads: layer 1 has 5 heads", "do not divide d_model 48; nearest valid: 4 or 6"),
    ({"heads": (16, 3, 4)}, "heads: layer 0 has 16 heads, so head dim 3", "nearest valid: 12 or 24"),
    ({"heads": (100, 2, 2)}, "heads: layer 0 has 100", "nearest valid: 24"),
    ({"heads": ()}, "heads: ()", "one head count per layer"),
    ({"heads": 4}, "heads: 4", "one head count per layer"),
    ({"heads": "2,x,4"}, "heads: 'x'", "hxN"),
    ({"heads": (2, 0, 4)}, "heads: layer 1 has 0", "positive integer"),
    ({"heads": (2, True, 4)}, "heads: layer 1 has True", "positive integer"),
    ({"kv_heads": (2, 2, 4)}, "kv_heads: layer 1 has 2", "do not divide its 3 heads; nearest valid: 1 or 3"),
    ({"kv_heads": (1, 1)}, "kv_heads: 2 layers given, but heads has 3", "must have 3 values"),
    ({"head_dim": (8, 8, 8, 8)}, "head_dim: 4 layers given, but heads has 3", "must have 3 values"),
    ({"head_dim": (8, 7, 8)}, "head_dim: layer 1 has 7", "nearest valid: 6 or 8"),
    ({"head_dim": (1, 8, 8)}, "head_dim: layer 0 has 1", "nearest valid: 2"),
    ({"local_window": (None, 0, 4)}, "local_window: layer 1 has 0", "positive integer"),
    ({"local_window": (None, 8)}, "local_window: 2 layers given", "must have 3 values"),
    ({"local_window": 8}, "local_window: 8", "one value per layer"),
    ({"vocab_size": 0}, "vocab_size: 0", "positive integer"),
    ({"context_length": "64"}, "context_length: '64'", "positive integer"),
    ({"d_model": 48.0}, "d_model: 48.0", "positive integer"),
    ({"d_model": 47, "heads": (47,)}, "heads: layer 0 has 47", "nearest valid: none"),
    ({"norm_eps": 0}, "norm_eps: 0", "positive number"),
    ({"init_std": float("nan")}, "init_std: nan", "positive number"),
    ({"rope_base": float("inf")}, "rope_base: inf", "positive number"),
    ({"tie_embeddings": 1}, "tie_embeddings: 1", "true or false"),
    ({"ffn": "swigul"}, "ffn: 'swigul'", "swiglu, mlp; did you mean 'swiglu'?"),
    ({"activation": "relu"}, "activation: 'relu'", "silu, gelu, gelu_tanh"),
    ({"norm": "rms"}, "norm: 'rms'", "did you mean 'rmsnorm'?"),
    ({"attention_bias": True}, "attention_bias: True", "none, output, all"),
    ({"positions": "alibi"}, "positions: 'alibi'", "rope, learned"),
    ({"attention_scale": None}, "attention_scale: None", "sqrt_head_dim, none"),
    ({"ffn_widht": 3}, "model config: unknown key 'ffn_widht'", "did you mean 'ffn_width'?"),
]


@pytest.mark.parametrize(("changes", "start", "contains"), BAD, ids=[bad[1] for bad in BAD])
def test_bad_input_is_one_clear_line(changes, start, contains):
    with pytest.raises(UserError) as caught:
        llama(**changes)
    message = str(caught.value)
    assert message.startswith(start)
    assert contains in message
    assert "\n" not in message


def test_unknown_block_and_missing_field():
    with pytest.raises(UserError, match=r"block: 'lama' is unknown.*did you mean 'llama'"):
        block("lama", **SIZES)
    with pytest.raises(UserError, match="model config: missing d_model, ffn_width"):
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
    with pytest.raises(UserError, match="tensor_parallel: 0"):
        config.padded_vocab_size(0)


def test_parameter_count_by_hand_with_every_switch_on():
    config = ModelConfig(
        vocab_size=100, context_length=10, d_model=12, heads=(2, 3), kv_heads=(1, 3), head_dim=(4, 6),
        ffn_width=20, norm="layernorm", norm_bias=True, attention_bias="all", ffn_bias=True,
        positions="learned", tie_embeddings=False,
    )  # fmt: skip
    layer_0 = 12 * 8 + 12 * 4 + 12 * 4 + 8 * 12  # q, k, v, o: A = 2 * 4, kv width = 1 * 4
    layer_0 += 8 + 4 + 4 + 12  # their biases
    layer_1 = 4 * 12 * 18 + 18 + 18 + 18 + 12  # A = kv width = 3 * 6
    shared = 3 * 12 * 20 + 20 + 20 + 12 + 2 * (12 + 12)  # gated feed-forward with biases, two norms
    outside = 10 * 12 + (12 + 12) + 100 * 12  # positions, final norm, output head
    assert config.num_parameters(embedding=False) == layer_0 + layer_1 + 2 * shared + outside - 10 * 12
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


@pytest.mark.parametrize("name", list(BLOCKS))
def test_json_round_trip(name):
    config = block(name, **SIZES)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert hash(config) == hash(ModelConfig.from_json(config.to_json()))


def test_json_takes_the_schedule_grammar():
    assert llama(heads="2,3,4", kv_heads="1x3") == llama(kv_heads=(1, 1, 1))


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
    with pytest.raises(UserError, match="unknown key 'head'; did you mean 'heads'"):
        config.replace(head=(1,))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        llama().d_model = 3
