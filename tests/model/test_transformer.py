"""The whole network against transformers' models, and against a plain loop in fp64."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gpt_neo import GPTNeoConfig, GPTNeoForCausalLM

from model.blocks import block
from model.errors import UserError
from model.initialization import initialize
from model.presets import preset
from model.transformer import Transformer
from tests.helpers.fuzzing import fixed, seeded
from tests.model import parallel
from tests.model.random_models import draw_model

SIZES = {"vocab_size": 260, "context_length": 96, "d_model": 48, "ffn_width": 128}
# Larger weights than a fresh model has, so that attention is far from uniform and mistakes show.
LARGE = {"init_std": 0.15}


def build(config, seed=0, dtype=torch.float32, **options):
    """A model whose biases and norm weights are random too: at 0 and 1 they could be left out unnoticed."""
    model = Transformer(config, **options)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.to(dtype)


def some_tokens(length=96, batch=2):
    return torch.randint(0, 260, (batch, length), generator=torch.Generator().manual_seed(1))


def parameters(model):
    return dict(model.named_parameters())


def copy_weights(mine, theirs, names, layers, transposed=()):
    """Copy between dicts of parameters by pairs (name here, name there), {l} standing for the layer.

    Every parameter of ours must be met, so none can be left at a value that happens to agree.
    """
    pairs = {}
    for here, there in names.items():
        for layer in range(layers) if "{l}" in here else [0]:
            pairs[here.format(l=layer)] = there.format(l=layer)
    assert set(pairs) == set(mine) and set(pairs.values()) <= set(theirs)
    with torch.no_grad():
        for here, there in pairs.items():
            value = mine[here].T if there.endswith(transposed) else mine[here]
            target = theirs[there]
            target.copy_(value[: target.shape[0]])  # without padded rows


def assert_equal_to(reference, model, names, transposed=(), done=()):
    """The logits with the same weights, of which *done* are copied; fp32, at most 1e-5 apart: rounding, at
    logits that are a few units large."""
    mine = {name: parameter for name, parameter in parameters(model).items() if name not in done}
    copy_weights(mine, parameters(reference), names, model.config.num_layers, transposed)
    tokens = some_tokens()
    reference.eval()
    with torch.no_grad():
        expected, output = reference(tokens).logits, model(tokens)
    assert output.shape == expected.shape == (*tokens.shape, 260)
    assert expected.std() > 0.5  # the comparison is about something
    assert (output - expected).abs().max().item() <= 1e-5


def with_biases(names, modules):
    """Add the biases of the modules (named as here) to a table of weights."""
    ends = tuple(f"{module}.weight" for module in modules)
    pairs = [(here, there) for here, there in names.items() if here.endswith(ends)]
    return names | {here.replace("weight", "bias"): there.replace("weight", "bias") for here, there in pairs}


LLAMA_NAMES = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "layers.{l}.attention_norm.weight": "model.layers.{l}.input_layernorm.weight",
    "layers.{l}.ffn_norm.weight": "model.layers.{l}.post_attention_layernorm.weight",
    "final_norm.weight": "model.norm.weight",
}
for here, there, parts in (("attention", "self_attn", "q k v o"), ("ffn", "mlp", "gate up down")):
    for x in parts.split():
        LLAMA_NAMES[f"layers.{{l}}.{here}.{x}.weight"] = f"model.layers.{{l}}.{there}.{x}_proj.weight"


GPT_NAMES = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "layers.{l}.attention_norm.weight": "transformer.h.{l}.ln_1.weight",
    "layers.{l}.attention.o.weight": "transformer.h.{l}.attn.c_proj.weight",
    "layers.{l}.ffn_norm.weight": "transformer.h.{l}.ln_2.weight",
    "layers.{l}.ffn.up.weight": "transformer.h.{l}.mlp.c_fc.weight",
    "layers.{l}.ffn.down.weight": "transformer.h.{l}.mlp.c_proj.weight",
    "final_norm.weight": "transformer.ln_f.weight",
}
NEO = "transformer.h.{{l}}.attn.attention.{}_proj.weight"
PARTS = {"q": "q", "k": "k", "v": "v", "o": "out"}
NEO_NAMES = GPT_NAMES | {f"layers.{{l}}.attention.{x}.weight": NEO.format(to) for x, to in PARTS.items()}
LLAMA_SIZES = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 128, "max_position_embeddings": 96}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("biases", [False, True])
def test_llama_block_against_transformers(tied, kv_heads, biases):
    bias = {"attention_bias": "all" if biases else "none", "ffn_bias": biases}
    heads = {"heads": (4,) * 3, "kv_heads": (kv_heads,) * 3}
    more = {"tie_embeddings": tied, "norm_eps": 1e-6, "rope_base": 5000.0}
    config = block("llama", **SIZES, **LARGE, **heads, **bias, **more)
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rms_norm_eps": 1e-6}
    switches = {"tie_word_embeddings": tied, "attention_bias": biases, "mlp_bias": biases}
    theirs = LlamaConfig(**LLAMA_SIZES, **shape, **rope, **switches)
    names = LLAMA_NAMES if tied else {**LLAMA_NAMES, "output.weight": "lm_head.weight"}
    if biases:
        names = with_biases(names, ["q", "k", "v", "o", "gate", "up", "down"])
    assert_equal_to(LlamaForCausalLM(theirs), build(config), names)


def test_llama3_wavelengths_against_transformers():
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"type": "llama3", **given, "original_context_length": 32}
    config = block("llama", **SIZES, **LARGE, heads=(2,) * 2, rope_scaling=scaling)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **given, "original_max_position_embeddings": 32}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    theirs = LlamaConfig(
        **LLAMA_SIZES, **shape, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    assert_equal_to(LlamaForCausalLM(theirs), build(config), LLAMA_NAMES)


def test_normed_queries_and_keys_against_transformers_qwen3():
    config = block("llama", **SIZES, **LARGE, heads=(4,) * 2, kv_heads=(2,) * 2, qk_norm="weighted")
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    theirs = Qwen3Config(**LLAMA_SIZES, **shape, rms_norm_eps=1e-5, tie_word_embeddings=True)
    norms = {
        f"layers.{{l}}.attention.{x}_norm.weight": f"model.layers.{{l}}.self_attn.{x}_norm.weight"
        for x in "qk"
    }
    assert_equal_to(Qwen3ForCausalLM(theirs), build(config), LLAMA_NAMES | norms)


@pytest.mark.parametrize("head_dim", [8, 20])
def test_llama_block_with_a_given_head_dim_against_transformers(head_dim):
    config = block("llama", **SIZES, **LARGE, heads=(6,) * 2, head_dim=(head_dim,) * 2)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": head_dim}
    theirs = LlamaConfig(**LLAMA_SIZES, **shape, rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert_equal_to(LlamaForCausalLM(theirs), build(config), LLAMA_NAMES)


def test_gpt2_block_against_transformers():
    model = build(block("gpt2", **SIZES, **LARGE, heads=(4,) * 3))
    shape = {"n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 128}
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=260, **shape, layer_norm_epsilon=1e-5))
    joint = {}  # GPT-2 keeps q, k and v in one matrix, [d, 3d]; the rest goes by name
    theirs = parameters(reference)
    with torch.no_grad():
        for layer in range(3):
            for own in ("weight", "bias"):
                parts = [f"layers.{layer}.attention.{x}.{own}" for x in "qkv"]
                joined = torch.cat([parameters(model)[part] for part in parts])
                target = theirs[f"transformer.h.{layer}.attn.c_attn.{own}"]
                target.copy_(joined.T if own == "weight" else joined)
                joint.update(dict.fromkeys(parts))
    names = with_biases(GPT_NAMES, ["norm", "o", "up", "down"])
    assert_equal_to(reference, model, names, transposed=("c_proj.weight", "c_fc.weight"), done=joint)


def test_gptneo_block_against_transformers():
    # Windows of 20 within 96 positions: without them, or one too wide, the logits differ.
    config = block("gptneo", **SIZES, **LARGE, heads=(4,) * 4, local_window=(None, 20, None, 20))
    shape = {"hidden_size": 48, "num_layers": 4, "num_heads": 4, "intermediate_size": 128}
    windows = {"attention_types": [[["global", "local"], 2]], "window_size": 20}
    theirs = GPTNeoConfig(vocab_size=260, max_position_embeddings=96, **shape, **windows)
    names = with_biases(NEO_NAMES, ["norm", "o", "up", "down"])
    assert_equal_to(GPTNeoForCausalLM(theirs), build(config), names)


def plain_logits(config, weights, tokens):
    """The network as loops over sequences, layers and heads: no SDPA, no reshapes, complex rotations."""

    def linear(name, x):
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(name, x):
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]
        return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x

    def rotated(x, layer):  # [T, d_h]
        base = config.rope_base[layer] if isinstance(config.rope_base, tuple) else config.rope_base
        share = config.rotary_share[layer] if isinstance(config.rotary_share, tuple) else config.rotary_share
        if config.positions != "rope" or base is None:
            return x
        x, rest = x[:, : round(share * x.shape[1])], x[:, round(share * x.shape[1]) :]
        half = x.shape[1] // 2
        frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
        if (scaling := config.rope_scaling) is not None:
            for pair, frequency in enumerate(frequencies.tolist()):
                wavelength = 2 * math.pi / frequency
                share = scaling.original_context_length / wavelength - scaling.low_freq_factor
                share /= scaling.high_freq_factor - scaling.low_freq_factor
                slow = frequency / scaling.factor
                share = min(1, max(0, share))
                frequencies[pair] = share * frequency + (1 - share) * slow
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag, rest], dim=1)

    tanh = {"approximate": "tanh"} if config.activation == "gelu_tanh" else {}
    activation = functools.partial(F.silu if config.activation == "silu" else F.gelu, **tanh)
    if config.activation == "relu2":
        activation = lambda x: x.clamp(min=0) ** 2  # noqa: E731
    rows = []
    for sequence in tokens:
        x = weights["token_embedding.weight"][sequence]  # [T, d]
        if config.positions == "learned":
            x = x + weights["position_embedding.weight"][: len(sequence)]
        blocks = config.block_width or config.d_model
        blocks = blocks if isinstance(blocks, tuple) else (blocks,) * len(config.heads)
        stream = torch.cat([x, x.new_zeros(len(x), max(*blocks, config.d_model) - config.d_model)], dim=1)
        for layer, heads in enumerate(config.heads):
            prefix = f"layers.{layer}"
            x, rest = stream[:, : blocks[layer]], stream[:, blocks[layer] :]
            width = config.head_dim[layer] if config.head_dim else blocks[layer] // (heads or 1)
            share = heads // (config.kv_heads[layer] if config.kv_heads else heads) if heads else 0
            window = config.local_window[layer] if config.local_window else None
            if heads:
                y = norm(f"{prefix}.attention_norm", x)
                q, k, v = (linear(f"{prefix}.attention.{name}", y) for name in "qkv")
            base = config.attention_scale_base
            scale = {
                "sqrt_head_dim": 1 / math.sqrt(width),
                "head_dim": math.sqrt(base or 1) / width,
                "constant": 1 / math.sqrt(base or 1),
                "none": 1.0,
            }[config.attention_scale]

            def normed(name, x, prefix=prefix):
                if config.qk_norm == "none":
                    return x
                x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
                weight = f"{prefix}.attention.{name}_norm.weight"
                return x * weights[weight] if config.qk_norm == "weighted" else x

            outputs = []
            for head in range(heads):
                own = slice(head * width, (head + 1) * width)
                shared = slice(head // share * width, (head // share + 1) * width)
                query, key = normed("q", q[:, own]), normed("k", k[:, shared])
                scores = rotated(query, layer) @ rotated(key, layer).T * scale
                distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
                hidden = (distance < 0) | (distance >= (window or len(x)))
                outputs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, shared])
            if heads:
                output = torch.cat(outputs, dim=1)
                if config.attention_gate == "element":
                    output = output / (1 + (-y @ weights[f"{prefix}.attention.gate.weight"].T).exp())
                if config.attention_gate == "head":
                    gates = 1 / (1 + (-y @ weights[f"{prefix}.attention.head_gate.weight"].T).exp())
                    output = output * gates.repeat_interleave(width, dim=1)
                x = x + linear(f"{prefix}.attention.o", output)
            if config.ffn_width[layer] if isinstance(config.ffn_width, tuple) else config.ffn_width:
                y = norm(f"{prefix}.ffn_norm", x)
                inner = linear(f"{prefix}.ffn.up", y)
                gated = config.ffn == "swiglu"
                inner = activation(linear(f"{prefix}.ffn.gate", y)) * inner if gated else activation(inner)
                x = x + linear(f"{prefix}.ffn.down", inner)
            stream = torch.cat([x, rest], dim=1)
        x = stream[:, : config.d_model]
        head = weights.get("output.weight", weights["token_embedding.weight"])
        ratio = config.d_model / (config.base_width or config.d_model)
        logits = norm("final_norm", x) / ratio @ head[: config.vocab_size].T
        cap = config.logit_softcap
        rows.append(logits if cap is None else cap * (logits / cap).tanh())
    return torch.stack(rows)


MIXTURE: dict[str, Any] = {"norm": "rmsnorm", "ffn": "swiglu", "activation": "silu", "positions": "rope"}
MIXTURE |= {"rope_base": 100.0, "norm_eps": 1e-3}
WINDOWS = {"heads": (3, 6, 16), "local_window": (7, None, 1)}
MODERN: dict[str, Any] = {"qk_norm": "weighted", "attention_scale": "head_dim", "attention_scale_base": 8}
MODERN |= {"ffn": "mlp", "activation": "relu2", "logit_softcap": 3.0, "z_loss": 0.05}
MODERN |= {"parametrization": "mup", "base_width": 20}
MODERN["rope_scaling"] = {"type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
MODERN["rope_scaling"]["original_context_length"] = 32
CONSTANT: dict[str, Any] = {"attention_scale": "constant", "attention_scale_base": 16}
TAPERED: dict[str, Any] = {"ffn_width": (80, 64, 16)}
POSITIONS: dict[str, Any] = {
    "heads": (2, 3, 4),
    "rope_base": (50, None, 1e4),
    "rotary_share": (0.5, 1, 1 / 3),
}
ABSENT: dict[str, Any] = {"ffn_width": (24, 0, 64, 8), "local_window": (None, 9, None, 3)}
CROSS: dict[str, Any] = {"block_width": (72, 24, 60, 36), "ffn_width": (72, 24, 0, 80)}
WAIST: dict[str, Any] = {"block_width": (48, 16, 32), "local_window": (None, 9, 3)}
PER_LAYER = {
    "prism": block("llama", **SIZES, **LARGE, heads=(1, 2, 3, 8, 24)),
    "descending": block("llama", **SIZES, **LARGE, heads=(24, 8, 2)),
    "grouped": block("llama", **SIZES, **LARGE, heads=(2, 6, 12), kv_heads=(1, 3, 12)),
    "head_dim": block("llama", **SIZES, **LARGE, heads=(1, 5, 7), head_dim=(16, 10, 4), kv_heads=(1, 1, 7)),
    "gptneo": block("gptneo", **SIZES, **LARGE, **WINDOWS, tie_embeddings=False),
    "mixture": block("gpt2", **SIZES, **LARGE, heads=(2, 3, 4), local_window=(None, 9, 200), **MIXTURE),
    "gelu": block("gpt2", **SIZES, **LARGE, heads=(16, 3), activation="gelu"),
    "modern": block("llama", **SIZES, **LARGE, **MODERN, heads=(2, 6, 12), kv_heads=(1, 3, 12)),
    "plain_norm": block("llama", **SIZES, **LARGE, heads=(2, 8), **CONSTANT, qk_norm="plain", z_loss=0.1),
    "positions": block("llama", **SIZES, **LARGE, **POSITIONS, kv_heads=(2, 1, 4)),
    "head_gate": block("llama", **SIZES, **LARGE, heads=(2, 6, 3), kv_heads=(1, 6, 3), attention_gate="head"),
    "element_gate": block("gpt2", **SIZES, **LARGE, heads=(4, 1, 3), attention_gate="element"),
    "tapered": block("llama", **SIZES | LARGE | TAPERED, heads=(2, 6, 3)),
    "absent": block("gpt2", **SIZES | LARGE | ABSENT, heads=(0, 3, 4, 0), tie_embeddings=False),
    "cross": block("llama", **SIZES | LARGE | CROSS, heads=(4, 3, 6, 0), kv_heads=(2, 3, 1, 0)),
    "waist": block("gpt2", **SIZES | LARGE | WAIST, heads=(4, 2, 8), attention_gate="head"),
    "wide": block("llama", **SIZES | LARGE | MODERN, heads=(2, 6, 4), block_width=(60, 96, 72)),
}


OPTIONS = [{"fused": "none"}, {"fused": "loss"}, {"fused": "all", "attention": "blocks"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", list(PER_LAYER))
def test_per_layer_heads_against_a_plain_loop_in_fp64(name, options):
    config = PER_LAYER[name]
    model = build(config, dtype=torch.float64, **options)
    tokens = some_tokens(length=40)
    weights = dict(model.named_parameters())
    expected = plain_logits(config, weights, tokens)
    output = model(tokens)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)  # fp64 rounding at logits of some 10
    # And the gradients, through the loss of either.
    labels = some_tokens(length=41)[:, 1:].clone()
    labels[0, :10] = -100
    reference = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    with torch.no_grad():
        assert model.eval()(tokens, labels).item() == pytest.approx(reference.item(), abs=1e-12)
    model.train()
    penalty = config.z_loss * expected.logsumexp(-1).square()[labels != -100].mean()
    parts = torch.stack([reference, penalty]).detach()
    reference = reference + penalty
    gradients = torch.autograd.grad(reference, list(weights.values()), allow_unused=True)
    loss = model(tokens, labels)
    loss.backward()
    torch.testing.assert_close(loss, reference, rtol=0, atol=1e-12)
    if config.z_loss:
        torch.testing.assert_close(model.loss_terms, parts, rtol=0, atol=1e-12)
    else:
        assert model.loss_terms is None
    for (where, parameter), gradient in zip(weights.items(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-11), where


@st.composite
def random_cases(draw):
    return draw_model(draw, t=1), draw(st.integers(1, 16)), draw(st.integers(0, 2))


@given(random_cases())
def equals_a_plain_loop(case):
    config, length, way = case
    model = parallel.build(config, torch.float64, **OPTIONS[way])
    tokens, labels = parallel.example(config, 2, length)
    weights = dict(model.named_parameters())
    expected = plain_logits(config, weights, tokens)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    assert parallel.relative(model(tokens), expected) <= 1e-12
    found = model(tokens, labels)
    if (labels == -100).all():
        return
    assert parallel.relative(found, loss) <= 1e-12
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    found.backward()
    # Some are sums that cancel, to zero in one of the two: they are compared with 1 % of the largest.
    floor = 1e-2 * max(gradient.abs().max() for gradient in gradients)
    for (where, parameter), gradient in zip(weights.items(), gradients, strict=True):
        scale = gradient.abs().max().clamp(min=floor)
        assert parallel.relative(parameter.grad, gradient, scale) <= 1e-12, where


def test_random_schedules_against_a_plain_loop_in_fp64():
    fixed(equals_a_plain_loop, examples=80)


@pytest.mark.slow
def test_many_random_schedules_against_a_plain_loop_in_fp64():
    seeded(equals_a_plain_loop, examples=1000)


@pytest.mark.parametrize("tied", [True, False])
def test_padded_rows_stay_zero(tied):
    config = preset("prism-nano").replace(tie_embeddings=tied)
    model = Transformer(config)
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    tokens = some_tokens(length=64)
    padded = [model.token_embedding.weight] + ([] if tied else [model.output.weight])
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        for weight in padded:
            assert weight.grad.shape[0] == 384 and torch.count_nonzero(weight.grad[260:]) == 0
        optimizer.step()
    for weight in padded:
        assert torch.count_nonzero(weight[260:]) == 0
        assert torch.count_nonzero(weight[:260]) == 260 * 48


def test_padded_rows_change_nothing():
    model = build(preset("prism-nano"))
    tokens = some_tokens(length=64)
    logits, loss = model(tokens), model(tokens, tokens)
    assert logits.shape == (2, 64, 260)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    with torch.no_grad():
        model.token_embedding.weight[260:] = 7.0
    assert torch.equal(model(tokens), logits) and torch.equal(model(tokens, tokens), loss)


def test_bf16_model_stays_close_to_fp32_and_its_loss_is_fp32():
    tokens = some_tokens(length=64)
    model = Transformer(preset("prism-nano"))
    initialize(model, 0)
    expected = model(tokens, tokens)
    rounded = model.bfloat16()(tokens, tokens)
    assert rounded.dtype == torch.float32 and model(tokens).dtype == torch.bfloat16
    torch.testing.assert_close(rounded, expected, rtol=5e-3, atol=0)


def test_too_many_positions_are_refused():
    with pytest.raises(UserError, match="tokens: 65 positions exceed context_length 64"):
        Transformer(preset("prism-nano"))(some_tokens(length=65))
