"""Which format holds which model; what padding costs; plain Llama and GPT-2 compute the same."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.blocks import block
from model.errors import UserError
from pretrain.hf.formats import ARCHITECTURES, choose_format
from pretrain.hf.padding import Padding, choose_padding
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, LLAMA, network, relative, tokens

PLAIN = dict.fromkeys(["uniform", "prism", "ablation", "descending", "grouped", "head_dim"], "llama")
PLAIN |= {"qwen3": "qwen3", "qwen3_padded": "qwen3", "plain_norm": "qwen3", "gpt2": "gpt2"}


@pytest.mark.parametrize(("name", "chosen"), PLAIN.items())
def test_plain_formats_have_our_logits(name, chosen, tmp_path):
    """1e-5 of the largest logit: q is rescaled by sqrt(D / d_h), which rounds once more."""
    theirs = AutoModelForCausalLM.from_pretrained(write_folder(network(name), tmp_path / "hf", chosen)).eval()
    assert type(theirs).__name__ == ARCHITECTURES[chosen]
    if chosen == "gpt2":  # llama.cpp's converter reads the old name
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["n_ctx"] == 64
    ids = tokens(2, 64)
    with torch.no_grad():
        assert relative(theirs(ids).logits, network(name)(ids)) <= 1e-5


MIXED: dict[str, dict[str, Any]] = {
    "the default recipe's": {"attention_scale": "head_dim", "attention_scale_base": 8},
    "groups": {"heads": (4, 6, 2), "kv_heads": (2, 3, 1), "attention_bias": "all"},
    "no scale": {"attention_scale": "none", "qk_norm": "plain"},
    "absent": {"heads": (0, 3, 4), "ffn_width": (96, 0, 128), "local_window": (8, 16, None)}
    | {"rotary_share": (0.3, 1, 1), "rope_base": (0.5, 5e3, 5e3)},
    "muP": {"parametrization": "mup", "base_width": 20, "attention_scale": "constant"}
    | {"attention_scale_base": 16, "tie_embeddings": True},
}


@pytest.mark.parametrize("changes", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("small", [1.0, 1e-2])
@torch.no_grad()
def test_heads_of_several_dims_with_norms_are_a_qwen3(changes, small, tmp_path):
    """With small queries and keys too, beside which the norms' epsilon counts."""
    ours = network(block("llama", **LLAMA | {"heads": (2, 3, 4), "qk_norm": "weighted"} | changes))
    for name, parameter in ours.named_parameters():
        if ".attention.q." in name or ".attention.k." in name:
            parameter.mul_(small)
    theirs = AutoModelForCausalLM.from_pretrained(write_folder(ours, tmp_path, "qwen3")).eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ids = tokens(2, 64)
    assert relative(theirs(ids).logits, ours(ids)) <= 1e-5


@pytest.mark.parametrize("scale", ["head_dim", "constant", "none"])
@torch.no_grad()
def test_a_llamas_queries_hold_the_factor_of_the_logits(scale, tmp_path):
    base = None if scale == "none" else 8
    ours = network(CONFIGS["prism"].replace(attention_scale=scale, attention_scale_base=base))
    theirs = AutoModelForCausalLM.from_pretrained(write_folder(ours, tmp_path, "llama")).eval()
    ids = tokens(2, 64)
    assert relative(theirs(ids).logits, ours(ids)) <= 1e-5


def test_auto_is_plain_where_the_weights_fit_unchanged():
    plain = {"uniform": "llama", "gpt2": "gpt2", "qwen3": "qwen3"}
    others = ("qwen3_padded", "prism", "grouped", "head_dim", "gpt2_prism", "gptneo", "biases", "modern")
    scaled = CONFIGS["qwen3"].replace(attention_scale="head_dim", attention_scale_base=16)
    assert choose_format(scaled, "auto") == "native" and choose_format(scaled, "qwen3") == "qwen3"
    for name in (*plain, *others):
        assert choose_format(CONFIGS[name], "auto") == plain.get(name, "native"), name
    # transformers' SmolLM3 needs even head dims
    unrotated = block("llama", **LLAMA, heads=(4, 4, 4, 4), rope_base=None)
    assert choose_format(unrotated, "auto") == "smollm3"
    assert choose_format(unrotated.replace(d_model=60), "auto") == "native"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_uniform_fixed_head_dim_grouped_queries_and_llama_3s_wavelengths_are_plain(kind):
    shape = {"heads": (4, 4), "kv_heads": (2, 2), "head_dim": (16, 16)}
    wide = block(kind, **LLAMA, **shape).replace(rope_scaling=CONFIGS["modern"].to_json()["rope_scaling"])
    assert choose_format(wide, "auto") == choose_format(wide, kind) == kind


def test_padding_is_the_smallest_that_fits():
    assert choose_padding(CONFIGS["prism"], "llama") == Padding(4, 4, 48, 128)  # head dims 24, 16, 12
    assert choose_padding(CONFIGS["head_dim"], "llama") == Padding(4, 4, 16, 128)
    # Groups of 2, 1 and 4 queries; 4 key/value heads of 4: 16 heads divide 48.
    assert choose_padding(CONFIGS["grouped"], "llama") == Padding(16, 4, 12, 128)
    assert choose_padding(CONFIGS["qwen3_padded"], "qwen3") == Padding(10, 5, 8, 128)  # 10 need not divide 48


def test_heads_are_raised_to_a_divisor_of_the_width():
    model = block("llama", **LLAMA, heads=(5, 4), head_dim=(8, 8))
    assert choose_padding(model, "llama") == Padding(6, 6, 8, 128)
    for other in ("mistral", "qwen2", "smollm3"):
        assert choose_padding(model, other) == Padding(5, 5, 8, 128)


@pytest.mark.parametrize(
    ("name", "chosen", "words"),
    [
        ("gpt2", "llama", "positions 'learned'"),
        ("gptneo", "llama", r"local_window \(no window\)"),
        ("biases", "llama", "norm_bias"),
        ("qwen3", "llama", r"qk_norm 'weighted' \('none'\)"),
        ("uniform", "qwen3", r"qk_norm 'none' \('weighted'\)"),
        ("modern", "qwen3", r"logit_softcap 4.0 \(None\)"),
        ("gptneo_windows", "qwen3", r"local_window \(one window\)"),
        ("cross", "llama", r"block_width \(80, 24, 48, 64\) \(None\)"),
        ("waist", "gpt2", r"block_width \(48, 12, 40\) \(None\)"),
        ("biases", "qwen3", r"ffn_bias True \(False\)"),
    ],
)
def test_a_plain_format_refuses_what_it_cannot_hold(name, chosen, words):
    with pytest.raises(UserError, match=f"format: '{chosen}' cannot hold this model: .*{words}"):
        choose_format(CONFIGS[name], chosen)


def test_the_advice_names_formats_of_the_command_alone():
    yarn = {"type": "yarn", "factor": 2.0, "original_context_length": 64}
    model = CONFIGS["grouped"].replace(attention_bias="qkv", rope_scaling=yarn)
    with pytest.raises(UserError, match=r"\(the same in every layer, with yarn\); valid: native or auto$"):
        choose_format(model, "llama")


def test_the_advice_names_no_format_without_a_head_count():
    sizes = {"vocab_size": 128, "context_length": 16, "d_model": 32, "ffn_width": 48}
    shape = {"heads": (3, 6), "kv_heads": (1, 2), "head_dim": 8, "logit_softcap": 4.0}
    with pytest.raises(UserError, match=r"; valid: native or auto$"):
        choose_format(block("llama", **sizes, **shape), "qwen3")


def test_no_head_count_that_fits():
    model = block("llama", **LLAMA, heads=(49,), head_dim=(2,))
    with pytest.raises(UserError, match="divides d_model 48"):
        choose_padding(model, "llama")
