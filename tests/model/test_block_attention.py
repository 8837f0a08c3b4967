"""Attention by products over blocks of queries, against torch's own in fp64; whole models against its
kernels."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from model import block_attention as module
from model.block_attention import block_attention

# B, h, queries, positions, d_h, window: several blocks and chunks of heads, the last of each smaller; one
# position; the last queries alone, as tensor-parallel ranks that share heads have them; windows within and
# across blocks.
SHAPES = {
    "whole": (2, 3, 300, 300, 16, None),
    "short": (1, 2, 5, 5, 8, None),
    "one": (1, 1, 1, 1, 4, None),
    "last queries": (2, 3, 130, 300, 16, None),
    "window": (2, 3, 300, 300, 16, 40),
    "wide window": (1, 2, 290, 290, 24, 200),
    "window of last queries": (1, 2, 150, 401, 24, 130),
    "window of all": (1, 2, 140, 140, 8, 140),
}


def inputs(shape, dtype):
    """q, k, v and the gradient of the output, with numbers that *dtype* has."""
    batch, heads, rows, positions, head_dim, _ = shape
    generator = torch.Generator().manual_seed(3)
    sizes = (rows, positions, positions, rows)
    return [torch.randn(batch, heads, n, head_dim, generator=generator).to(dtype) for n in sizes]


def results(attend, tensors):
    """The output and the gradients of q, k and v."""
    *leaves, gradient = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def exactly(shape, tensors, scale=None):
    """By torch in fp64, with the mask written out."""
    _, _, rows, positions, _, window = shape
    place = torch.arange(positions)
    behind = place[positions - rows :, None] - place
    mask = (behind >= 0) & (behind < (window or positions))
    attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask, scale=scale)
    return results(attend, [tensor.double() for tensor in tensors])


def errors(found, expected):
    """‖found − expected‖ / ‖expected‖, of each."""
    norm = torch.linalg.vector_norm
    pairs = zip(found, expected, strict=True)
    return [float(norm(one.double() - other) / norm(other).clamp(min=1e-30)) for one, other in pairs]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_fp64(name, dtype, bound):
    shape = SHAPES[name]
    tensors = inputs(shape, dtype)
    found = results(lambda q, k, v: block_attention(q, k, v, None, shape[-1]), tensors)
    assert all(tensor.dtype == dtype for tensor in found)
    if name == "one":  # a softmax of one logit: q and k have no gradient
        assert not found[1].any() and not found[2].any()
        assert torch.equal(found[0], tensors[2]) and torch.equal(found[3], tensors[3])
        return
    assert max(errors(found, exactly(shape, tensors))) < bound


def test_many_chunks_of_heads_are_one_result(monkeypatch):
    shape = (3, 4, 150, 150, 8, None)
    tensors = inputs(shape, torch.float64)
    monkeypatch.setattr(module, "ELEMENTS", 5 * 128 * 150)
    monkeypatch.setattr(module, "HEADS", 1)  # five of twelve heads at a time
    found = results(lambda q, k, v: block_attention(q, k, v, None, None), tensors)
    assert max(errors(found, exactly(shape, tensors))) < 1e-14


def test_another_scale_and_views_of_other_layouts():
    shape = SHAPES["whole"]
    tensors = inputs(shape, torch.float64)
    # As the model has them.
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    found = results(lambda q, k, v: block_attention(q, k, v, 1.0, None), strided)
    assert max(errors(found, exactly(shape, tensors, 1.0))) < 1e-14


@pytest.mark.parametrize(("sd", "bound"), [(1, 6e-3), (4, 1.5e-2), (8, 3e-2)])
def test_logits_that_are_large_round_more(sd, bound):
    """The stated bounds in bf16: a logit is rounded to 2^-9 of itself."""
    shape = (2, 4, 512, 512, 64, None)
    tensors = inputs(shape, torch.bfloat16)
    tensors[0] = tensors[0] * sd
    found = results(lambda q, k, v: block_attention(q, k, v, None, None), tensors)
    assert max(errors(found, exactly(shape, tensors))) < bound


def test_a_mask_made_while_sampling_serves_training():
    tensors = inputs(SHAPES["short"], torch.float32)
    attend = functools.partial(block_attention, scale=None, window=None)
    expected = results(attend, tensors)
    module._hide_unseen.cache_clear()
    with torch.inference_mode():
        attend(*tensors[:3])
    assert all(map(torch.equal, results(attend, tensors), expected))


@pytest.mark.slow
def test_the_operators_are_whole():
    """torch's own checks: schema, shapes without data, gradients, and tracing."""
    query, key, value, gradient = inputs(SHAPES["short"], torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    torch.library.opcheck(torch.ops.head_schedules.block_attention.default, (*leaves, 0.5, 3))
    plain = [tensor.detach() for tensor in leaves]
    torch.library.opcheck(
        torch.ops.head_schedules.block_attention_backward.default, (gradient, *plain, 0.5, 3)
    )


def test_nothing_but_the_inputs_is_kept():
    """Also of several sequences, whose heads are no view of one dimension; or gathered keys would be kept."""
    inputs_of = [torch.randn(2, 40, 3, 8, requires_grad=True).transpose(1, 2) for _ in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        block_attention(*inputs_of, None, None)
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs_of}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == storages
