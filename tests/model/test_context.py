"""Any head schedule on any number of context ranks equals the unsplit model: logits, loss and every gradient,
in fp64."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from model.blocks import block
from model.context import ContextExchange
from model.context_plan import ContextForm, context_form, elements_sent, key_rows
from model.presets import preset
from pretrain.plan.context_parallel import plan_context_parallel
from pretrain.plan.tensor_parallel import plan_tensor_parallel
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.model.parallel import Sent, build, compared, example, many_differences, shared_grid, whole_of
from tests.model.test_exchange import GROUPED, MODERN, SHAPE, TOLERANCE, VARYING, WIDE, WINDOWS, worst

LEARNED = block("gpt2", **SHAPE, d_model=48, heads=(3, 4, 12))
"""With learned positions; 12 heads are exchanged in part at c = 8."""
ABSENT = block(
    "llama",
    **SHAPE | {"ffn_width": (12, 0, 24, 6)},
    d_model=24,
    heads=(0, 3, 4, 0),
    kv_heads=(0, 1, 4, 0),
    head_dim=(2, 12, 12, 2),
    attention_gate="element",
)
MODELS = (GROUPED, WINDOWS, WIDE, MODERN, LEARNED, ABSENT, VARYING[2])


def cases(context_parallel, batch=1, **options):
    length = 48 if context_parallel in (4, 8) else 24
    found = []
    for number, config in enumerate(MODELS):
        given = {"context_parallel": context_parallel, "checkpoint_activations": number % 2 == 1, **options}
        found.append((config.replace(context_length=length), batch, length, given))
    return found


@pytest.mark.parametrize("context_parallel", [2, *slow([3, 4])])
def test_equals_one_rank(context_parallel):
    results = run_distributed(many_differences, context_parallel, cases(context_parallel))
    for config, found in zip(MODELS, worst(results), strict=True):
        assert found[0] <= TOLERANCE, (config.summary(), found)


@pytest.mark.parametrize(
    ("context_parallel", "tensor_parallel", "batch", "options"),
    [
        # the query form: rows of a rank are two parts of its chunks
        pytest.param(2, 2, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param(3, 2, 2, {}, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param(8, 1, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_with_tensor_parallelism(context_parallel, tensor_parallel, batch, options):
    world = context_parallel * tensor_parallel
    results = run_distributed(many_differences, world, cases(context_parallel, batch, **options), timeout=200)
    for config, found in zip(MODELS, worst(results), strict=True):
        assert found[0] <= TOLERANCE, (config.summary(), found)


def packed_differences(config, context_parallel, batch, length, options):
    """As many_differences, of packed documents that cross the borders of chunks."""
    tokens, labels = example(config, batch, length)
    starts = [row * length + first for row in range(batch) for first in (0, 1, 5 + row, 11, length - 4)]
    offsets = torch.tensor([*starts, batch * length], dtype=torch.int32)
    alone = build(config, torch.float64)
    expected = whole_of(alone, alone(tokens, None, offsets), alone(tokens, labels, offsets))
    model = build(config, torch.float64, shared_grid(False, context_parallel), **options)
    return [compared(model, expected, tokens, labels, offsets)]


@pytest.mark.parametrize(("ranks", "context_parallel"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [GROUPED, WINDOWS], ids=["grouped", "windows"])
def test_packed_documents_equal_one_rank(config, ranks, context_parallel):
    results = run_distributed(packed_differences, ranks, config, context_parallel, 2, 24, {})
    assert worst(results)[0][0] <= TOLERANCE, worst(results)


LOCAL = block("gptneo", **SHAPE, d_model=48, heads=(3, 6, 4, 1), local_window=(5, 2, 3, None))
"""At T = 96 windows are shorter than chunks, and keys travel as far as they are seen."""


def bytes_sent(config, context_parallel, batch, checkpointing):
    """Bytes sent for attention, and the plan's for this rank."""
    grid = shared_grid(False, context_parallel)
    model = build(config, torch.float32, grid, checkpoint_activations=checkpointing)
    tokens, labels = example(config, batch, config.context_length)
    with Sent() as sent:
        model(tokens, labels).backward()
    c, t = context_parallel, grid.tensor_parallel
    plan = plan_context_parallel(config, c, t, batch, "fp32", checkpointing=checkpointing)
    indices = (grid.context_rank // layer.form.head_ranks for layer in plan.layers)
    context = sum(layer.sent_bytes[index] for layer, index in zip(plan.layers, indices, strict=True))
    exchange = plan_tensor_parallel(config, t, batch, "fp32", c).exchange_bytes
    exchange = exchange * 3 // 2 if checkpointing else exchange
    windows = {layer.form.window is not None for layer in plan.layers if layer.form.key_ranks > 1}
    return (
        sent.bytes["all_to_all_single"] + sent.bytes["all_gather_into_tensor"],
        context + exchange,
        windows,
    )


@pytest.mark.parametrize(("ranks", "context_parallel"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_bytes_sent_equal_the_plan(ranks, context_parallel):
    found = set()
    for config, checkpointing in ((GROUPED, False), (LOCAL, False), (WIDE, True)):
        config = config.replace(context_length=96)
        for sent, planned, windows in run_distributed(
            bytes_sent, ranks, config, context_parallel, 2, checkpointing
        ):
            assert sent == pytest.approx(planned, abs=1e-6)
            found |= windows
    assert found == {True, False}  # keys travel whole, and only as far as they are seen


@pytest.mark.parametrize("context_parallel", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_windows_shorter_than_chunks(context_parallel):
    case = (LOCAL.replace(context_length=96), 1, 96, {"context_parallel": context_parallel})
    assert worst(run_distributed(many_differences, context_parallel, [case]))[0][0] <= TOLERANCE


def test_keys_travel_as_far_as_a_window_sees():
    # 2 groups, T = 16: group 0 has 0-3 and 12-15, group 1 has 4-11. A window of 3 sees two positions before.
    assert key_rows(2, 16, 3) == [[[], [(2, 4)]], [[(10, 12)], []]]
    form = ContextForm(1, 2, 3)
    # Per row 10 columns of keys and 10 of values: gathered twice, and 2 rows of gradients sent back.
    assert elements_sent(form, 10, 10, 16) == [20 * (2 * 2 + 2)] * 2
    assert elements_sent(ContextForm(1, 2), 10, 10, 16) == [3 * 20 * 8] * 2


def test_the_form_with_the_fewest_bytes_is_chosen():
    def chosen(config, c, t=1):
        forms = [context_form(config, layer, c, t) for layer in range(config.num_layers)]
        return [(form.head_ranks, form.key_ranks) for form in forms]

    prism = preset("prism-124m")  # heads 3 3 6 6 8 8 12 …
    assert chosen(prism, 4)[::2] == [(1, 4), (2, 2), (4, 1), (4, 1), (4, 1), (4, 1)]
    assert chosen(prism, 8)[::2] == [(1, 8), (2, 4), (8, 1), (4, 2), (4, 2), (4, 2)]
    assert chosen(prism, 2, 4)[::2] == [(1, 2), (1, 2), (2, 1), (1, 2), (1, 2), (1, 2)]
    # Two key/value heads of eight: gathering these is less than exchanging ten.
    grouped = block("llama", **SHAPE, d_model=64, heads=(8,), kv_heads=(2,))
    assert chosen(grouped, 2) == [(1, 2)]


def sampled(context_parallel):
    """The largest difference of the logits of prefixes of every length, as sampling asks for them."""
    tokens, _ = example(GROUPED, 1, 24)
    reference = build(GROUPED, torch.float64)
    model = build(GROUPED, torch.float64, shared_grid(False, context_parallel))
    with torch.no_grad():
        prefixes = [tokens[:, :n] for n in (1, 2, 7, 23, 24)]
        return max((model(part) - reference(part)).abs().max().item() for part in prefixes)


def test_sampling_takes_any_length():
    assert max(run_distributed(sampled, 3, 3)) <= 1e-11  # logits are of the order of 10


def kept_for_backward(context_parallel):
    """Bytes that autograd keeps of the context ranks' keys and values, in elements of one position."""
    config = block("llama", **SHAPE | {"context_length": 96}, d_model=48, heads=(1, 1))
    model = build(config, torch.float64, shared_grid(False, context_parallel))
    made = []
    gather = ContextExchange.gather_keys
    with mock.patch.object(ContextExchange, "gather_keys", lambda *given: made.append(1) or gather(*given)):
        tokens, labels = example(config, 2, 96)
        loss = model(tokens, labels)
        forward = len(made)
        alive = sum(
            t.nelement() for t in gc.get_objects() if torch.is_tensor(t) and t.shape[:3] == (2, 2, 96)
        )
        loss.backward()
    return forward, len(made), alive


def test_gathered_keys_are_not_kept():
    for forward, all_passes, alive in run_distributed(kept_for_backward, 2, 2):
        assert (forward, all_passes, alive) == (
            2,
            4,
            0,
        )  # each of 2 layers once, and again in the backward pass
