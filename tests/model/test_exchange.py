"""Any head schedule on any number of ranks equals the unsplit model: forward, loss and every gradient, in
fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from model.blocks import block
from model.config import ModelConfig
from model.errors import UserError
from model.exchange import BatchForm, HeadExchange, QueryForm
from model.presets import preset, preset_names
from pretrain.plan.tensor_parallel import plan_tensor_parallel
from tests.helpers.distributed import run_distributed
from tests.helpers.fuzzing import fixed
from tests.helpers.marks import slow
from tests.model.parallel import Sent, build, example, many_differences, scaled_down, shared_grid
from tests.model.random_models import draw_model

# Everything is compared relative to its own largest value; see tests/model/parallel.py for gradients that are
# zero.
TOLERANCE = 1e-12
SHAPE = {"vocab_size": 260, "context_length": 24, "ffn_width": 48}
# Whole heads, groups and heads cut in every way, grouped queries, one head; windows that end inside chunks.
HEADS = {"d_model": 48, "heads": (3, 4, 6, 2, 1)}
GROUPED = block("llama", **SHAPE, **HEADS, kv_heads=(3, 2, 3, 2, 1), tie_embeddings=False)
WINDOWS = block("gptneo", **SHAPE, **HEADS, local_window=(5, None, 1, 9, 3))
# The width follows the heads.
WIDE = block("llama", **SHAPE, d_model=24, heads=(1, 2, 5), head_dim=(12, 24, 12))
# Weights that every rank uses for its own heads, and a loss whose gradient is not the softmax's alone.
MODERN = GROUPED.replace(
    qk_norm="weighted",
    logit_softcap=2.0,
    z_loss=0.1,
    parametrization="mup",
    base_width=32,
    attention_scale="head_dim",
    attention_scale_base=16,
)
CLASSIFIER = WIDE.replace(classes=5)
ABSENT = GROUPED.replace(heads=(3, 0, 6, 2, 0), kv_heads=(3, 0, 3, 2, 0), ffn_width=(48, 48, 0, 0, 48))
# Widths of the residual stream that no degree divides; key/value and attention widths that all divide.
CROSS = block(
    "llama", **SHAPE, d_model=25, block_width=(31, 17, 9, 25), heads=(2, 1, 4, 2), head_dim=(12, 12, 6, 12)
)
LEARNED = block(
    "gpt2",
    **SHAPE | {"ffn_width": (24, 0, 12)},
    d_model=24,
    heads=(2, 4, 0),
    **{"block_width": (24, 48, 7), "attention_gate": "head"},
)
WIDTHS = (72, 24, 48, 36, 12)
VARYING = (CROSS, LEARNED, MODERN.replace(block_width=WIDTHS), GROUPED.replace(block_width=WIDTHS))


def worst(results: list[list[dict[str, float]]]) -> list[tuple[float, str]]:
    """Of each case, the largest difference of any rank and what it is of."""
    cases = zip(*results, strict=True)
    return [max((value, name) for rank in case for name, value in rank.items()) for case in cases]


@pytest.mark.parametrize("tensor_parallel", [2, *slow([3, 4])])
@pytest.mark.parametrize("batch_form", [True, False], ids=["batch", "query"])
def test_equals_one_rank(tensor_parallel, batch_form):
    batch = tensor_parallel if batch_form else 1
    cases = [
        (config, batch, 24, {"checkpoint_activations": checkpointing})
        for config, checkpointing in (
            (GROUPED, False),
            (WINDOWS, True),
            (WIDE, False),
            (MODERN, True),
            (CLASSIFIER, False),
            *((varying, True) for varying in VARYING),
        )
    ]
    for found in worst(run_distributed(many_differences, tensor_parallel, cases)):
        assert found[0] <= TOLERANCE, found


@pytest.mark.parametrize("tensor_parallel", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_parallel_norms_equal_one_rank(tensor_parallel):
    # 22 positions are not a multiple of 4 (padded); 4 sequences take the batch form, 1 the query form.
    gpt2, on = block("gpt2", **SHAPE, d_model=48, heads=(3, 4)), {"sequence_parallel": True}
    cases = [(GROUPED, 4, 22, on), (WINDOWS, 4, 24, on), (gpt2, 1, 24, on), (MODERN, 4, 24, on)]
    cases += [(GROUPED, 1, 24, on | {"checkpoint_activations": True})]
    cases += [(varying, 4, 24, on) for varying in VARYING]
    for found in worst(run_distributed(many_differences, tensor_parallel, cases)):
        assert found[0] <= TOLERANCE, found


# Every schedule of the presets has heads to exchange at one of them; a multiple of 12 heads only at 5.
DEGREES = (2, 3, 4, 5)


def small_presets() -> list[tuple[str, ModelConfig, int]]:
    """Every preset's schedule and block, once where presets are alike at this size, with the smallest t of
    DEGREES at which a layer's heads are exchanged."""
    seen: dict[ModelConfig, tuple[str, int]] = {}
    for name in preset_names():
        config = preset(name)
        t = next(t for t in DEGREES if any(heads % t for heads in scaled_down(config, t).heads))
        seen.setdefault(scaled_down(config, t), (name, t))
    return [(name, config, t) for config, (name, t) in seen.items()]


@pytest.mark.parametrize("gate", ["head", *slow(["none", "element"])])
def test_absent_parts_and_gates_with_sequence_parallelism(gate):
    widths = {"heads": (0, 3, 4, 0), "kv_heads": (0, 1, 4, 0), "head_dim": (2, 12, 12, 2)}
    widths |= {"ffn_width": (12, 0, 24, 6)}
    ways = [{"sequence_parallel": True}, {"sequence_parallel": True, "checkpoint_activations": True}]
    cases = []
    for kind in ("llama", "gpt2"):
        config = block(kind, **SHAPE | widths, d_model=24, attention_gate=gate)
        cases += [(config, 3, 12, options) for options in [*ways, {"fused": "all"}]]
    for name, largest in zip("abcdef", worst(run_distributed(many_differences, 3, cases)), strict=True):
        assert largest[0] <= TOLERANCE, (name, largest)


@pytest.mark.parametrize("tensor_parallel", [*DEGREES[:1], *slow(DEGREES[1:])])
def test_every_preset_scaled_down(tensor_parallel):
    chosen = [(name, config) for name, config, t in small_presets() if t == tensor_parallel]
    assert all(any(heads % tensor_parallel for heads in config.heads) for _, config in chosen)
    assert len(chosen) >= 8
    length = 24 - 24 % (2 * tensor_parallel)
    # The query form, for which 2t divides the length, and the batch form in turn.
    sizes = (1, tensor_parallel) * len(chosen)
    cases = [(config, size, length, {}) for (_, config), size in zip(chosen, sizes, strict=False)]
    found = worst(run_distributed(many_differences, tensor_parallel, cases))
    for (name, _), largest in zip(chosen, found, strict=True):
        assert largest[0] <= TOLERANCE, (name, largest)


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[int, ModelConfig, int, int]:
    """t, a random model whose widths t divides, B and T that one of the forms can split."""
    t = draw(st.sampled_from([2, 3, 4]))
    config, length = draw_model(draw, t), draw(st.integers(1, 16))
    batch = draw(st.integers(1, 5))
    try:
        plan_tensor_parallel(config.replace(context_length=length), t, batch)
    except UserError:
        assume(False)
    return t, config, batch, length


@given(random_cases())
def equals_one_rank(case):
    t, config, batch, length = case
    found = worst(run_distributed(many_differences, t, [(config, batch, length, {})]))
    assert found[0][0] <= TOLERANCE, found


@pytest.mark.slow
def test_random_schedules():
    fixed(equals_one_rank, examples=16)


def bytes_sent(config, batch, dtype, checkpointing=False):
    grid = shared_grid(False)
    model = build(config, dtype, grid, checkpoint_activations=checkpointing)
    tokens, labels = example(config, batch, config.context_length)
    with Sent() as sent:
        model(tokens, labels).backward()
    return sent.bytes


@pytest.mark.parametrize(
    ("tensor_parallel", "dtype", "name"),
    [(2, torch.bfloat16, "bf16"), *slow([(3, torch.float64, "fp64"), (4, torch.float32, "fp32")])],
)
def test_bytes_sent_equal_the_plan(tensor_parallel, dtype, name):
    cases = (
        (GROUPED, 12),
        (GROUPED, 1),
        (WINDOWS, 12),
        (WINDOWS, 1),
        (VARYING[3], 12),
        (ABSENT, 12),
        (CLASSIFIER, 12),
    )
    for config, batch in cases:
        expected = plan_tensor_parallel(config, tensor_parallel, batch, name)
        for sent in run_distributed(bytes_sent, tensor_parallel, config, batch, dtype):
            exchanged = sent["all_to_all_single"] + sent["all_gather_into_tensor"]
            assert exchanged == pytest.approx(expected.exchange_bytes, abs=1e-6)
            # The plan rounds each all-reduce down to whole bytes.
            assert sent["all_reduce"] == pytest.approx(expected.all_reduce_bytes, rel=1e-4)
            assert (sent["all_gather_into_tensor"] > 0) == (batch == 1)  # only the query form gathers


def forms():
    grid = shared_grid(False)
    exchange = [HeadExchange(GROUPED, layer, grid) for layer in range(5)]
    kinds = [[type(layer.form(batch, 24)) for layer in exchange] for batch in (4, 2, 1)]
    with pytest.raises(UserError) as caught:
        exchange[0].form(2, 12)
    with torch.no_grad():
        padded = exchange[0].form(1, 7)
    return kinds, exchange[0].form(1, 24).spans, str(caught.value), type(padded)


def test_which_form_is_chosen():
    results = run_distributed(forms, 4)
    for rank, (kinds, spans, message, padded) in enumerate(results):
        # KV heads 3, 2, 3, 2, 1 on 4 ranks: shared by 4, 2, 4, 2, 4 ranks.
        mixed = [QueryForm, BatchForm, QueryForm, BatchForm, QueryForm]
        assert kinds == [[BatchForm] * 5, mixed, [QueryForm] * 5]
        assert spans == [(3 * rank, 3 * rank + 3), (21 - 3 * rank, 24 - 3 * rank)]  # zigzag
        assert padded is BatchForm
        assert message == (
            "micro_batch: 2 sequences of 12 tokens cannot be shared by the 4 ranks that split the heads of "
            "layer 0; micro_batch must be a multiple of 4 (nearest: 4), or context_length one of 8"
        )


def sampled(sequence_parallel):
    """Logits of prefixes of every length, of one sequence, as sampling asks for them."""
    tokens, _ = example(GROUPED, 1, 24)
    reference = build(GROUPED, torch.float64)
    grid = shared_grid(sequence_parallel)
    model = build(GROUPED, torch.float64, grid)
    with torch.no_grad():
        prefixes = [tokens[:, :n] for n in (1, 2, 7, 23, 24)]
        return max((model(part) - reference(part)).abs().max().item() for part in prefixes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sampling_takes_any_length(sequence_parallel):
    assert max(run_distributed(sampled, 4, sequence_parallel)) <= 1e-11  # logits are of the order of 10
