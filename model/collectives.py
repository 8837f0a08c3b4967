"""Differentiable collectives, for any backend (gloo, NCCL) and any dtype.

megatron-core's mappings are not used: some allocate on the current CUDA device even if the tensor is
elsewhere, and its all-reduce returns a non-contiguous tensor unreduced. Nothing here modifies its argument,
since autograd may pass one gradient tensor to two consumers.

Every function takes a tensor and a process group, and has its transpose as its backward pass:
copy <-> sum, all-gather <-> sum-scatter, all-to-all <-> itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, Any], Tensor]


def _all_reduce(tensor: Tensor, group: Any) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def exchange(tensor: Tensor, group: Any) -> Tensor:
    """all_to_all without gradients."""
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor)
    dist.all_to_all_single(result, tensor, group=group)
    return result


def gather(tensor: Tensor, group: Any) -> Tensor:
    """[...] -> [r, ...], without gradients: row i is rank i's tensor."""
    tensor = tensor.contiguous()
    result = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    # gloo needs the output as a concatenation along the first dimension; NCCL also accepts that.
    dist.all_gather_into_tensor(result.view(-1), tensor.view(-1), group=group)
    return result


def add_and_scatter(tensor: Tensor, group: Any) -> Tensor:
    """A reduce-scatter made of an all-to-all and a sum: the same bytes travel, the additions have one fixed
    order, and bf16 terms are added in fp32 and rounded once."""
    received = exchange(tensor, group)
    sum_dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    return received.sum(dim=0, dtype=sum_dtype).to(tensor.dtype)


def _gather_columns(tensor: Tensor, group: Any) -> Tensor:
    return gather(tensor, group).movedim(0, -2).flatten(-2)


def _take_own_columns(tensor: Tensor, group: Any) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


def _times_ranks(tensor: Tensor, group: Any) -> Tensor:
    return tensor * dist.get_world_size(group)


def _pass_through(tensor: Tensor, group: Any) -> Tensor:
    return tensor.view_as(tensor)


def make_differentiable(ahead: Collective, back: Collective) -> Collective:
    """The collective *ahead* with its transpose, *back*, as the backward pass."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
            ctx.group = group
            return ahead(tensor, group)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return back(gradients[0], ctx.group), None

    return Function.apply


copy_to_ranks = make_differentiable(_pass_through, _all_reduce)
"""Pass a replicated tensor into work that differs by rank; its gradient is summed over the group's ranks."""
sum_over_ranks = make_differentiable(_all_reduce, _pass_through)
"""Sum of the ranks' tensors, on every rank; each rank gets the sum's gradient."""
all_to_all = make_differentiable(exchange, exchange)
"""[r, ...] -> [r, ...]: rank i's row j becomes rank j's row i."""
all_gather = make_differentiable(gather, add_and_scatter)
"""[...] -> [r, ...]: row i is rank i's tensor; a rank's gradient is summed over all ranks that used it."""
sum_scatter = make_differentiable(add_and_scatter, gather)
"""[r, ...] -> [...]: on rank i, the sum of all ranks' rows i (a reduce-scatter)."""
gather_last = make_differentiable(_gather_columns, _take_own_columns)
"""[..., c] -> [..., r c]: all ranks' columns in rank order, for work that every rank repeats.

Its gradient is the same on all ranks, so each takes its own columns of it; nothing is summed.
"""
sum_of_shares = make_differentiable(_all_reduce, _times_ranks)
"""Sum of the ranks' shares of a loss, on every rank. Its gradient is that of the sum of all ranks' results,
so that gradients which are averaged over the ranks, as those of copies are, come out right."""


def gather_sequence(part: Tensor, group: Any) -> Tensor:
    """Hidden states [B, T / r, d] of all ranks, which share T -> [B, T, d]."""
    return all_gather(part, group).transpose(0, 1).flatten(1, 2)
