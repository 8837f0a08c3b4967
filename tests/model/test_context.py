"""Any head schedule on any number of context ranks equals the unsplit model: logits, loss and every gradient,
in fp64."""

from __future__ import annotations

import pytest
import torch

from model.blocks import block
from tests.helpers.distributed import run_distributed
from tests.model.parallel import build, compared, example, many_differences, shared_grid, whole_of
from tests.model.test_exchange import GROUPED, MODERN, SHAPE, TOLERANCE, WIDE, WINDOWS, worst

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
MODELS = (GROUPED, WINDOWS, WIDE, MODERN, LEARNED, ABSENT)


def cases(context_parallel, batch=1, **options):
    length = 48 if context_parallel in (4, 8) else 24
    found = []
    for number, config in enumerate(MODELS):
        given = {"context_parallel": context_parallel, "checkpoint_activations": number % 2 == 1, **options}
        found.append((config.replace(context_length=length), batch, length, given))
    return found


@pytest.mark.parametrize("context_parallel", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_rank(context_parallel):
    results = run_distributed(many_differences, context_parallel, cases(context_parallel))
    for config, found in zip(MODELS, worst(results), strict=True):
        assert found[0] <= TOLERANCE, (config.summary(), found)


@pytest.mark.parametrize(
    ("context_parallel", "tensor_parallel", "batch", "options"),
    [
        (2, 2, 1, {}),  # the query form: rows of a rank are two parts of its chunks
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
