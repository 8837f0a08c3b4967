"""Differentiable collectives, for any backend (gloo, NCCL) and any dtype.

megatron-core's mappings are not used: some allocate on the current CUDA device even if the tensor is elsewhere,
and its all-reduce returns a non-contiguous tensor unreduced. Nothing here modifies its argument, since autograd may
pass one gradient tensor to two consumers.

Every function has its transpose as its backward pass:
copy <-> sum, all-gather <-> sum-scatter, all-to-all <-> itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_ranks(tensor: Tensor, group: Any) -> Tensor:
    """Pass a replicated tensor into work that differs by rank; its gradient is summed over the group's ranks."""
    return _Copy.apply(tensor, group)


def sum_over_ranks(tensor: Tensor, group: Any) -> Tensor:
    """Sum of the ranks' tensors, on every rank; each rank gets the sum's gradient."""
    return _Sum.apply(tensor, group)


def all_to_all(tensor: Tensor, group: Any) -> Tensor:
    """[r, ...] -> [r, ...]: rank i's row j becomes rank j's row i."""
    return _AllToAll.apply(tensor, group)


def all_gather(tensor: Tensor, group: Any) -> Tensor:
    """[...] -> [r, ...]: row i is rank i's tensor; a rank's gradient is summed over all ranks that used it."""
    return _AllGather.apply(tensor, group)


def sum_scatter(tensor: Tensor, group: Any) -> Tensor:
    """[r, ...] -> [...]: on rank i, the sum of all ranks' rows i (a reduce-scatter)."""
    return _SumScatter.apply(tensor, group)


def gather_last(tensor: Tensor, group: Any) -> Tensor:
    """[..., c] -> [..., r c]: all ranks' columns in rank order, for work that every rank repeats.

    Its gradient is the same on all ranks, so each takes its own columns of it; nothing is summed.
    """
    return _GatherLast.apply(tensor, group)


def _all_reduce(tensor: Tensor, group: Any) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _exchange(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor)
    dist.all_to_all_single(result, tensor, group=group)
    return result


def _gather(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.contiguous()
    result = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    # gloo needs the output as a concatenation along the first dimension; NCCL accepts that, too.
    dist.all_gather_into_tensor(result.view(-1), tensor.view(-1), group=group)
    return result


def _add_and_scatter(tensor: Tensor, group: Any) -> Tensor:
    """A reduce-scatter made of an all-to-all and a sum: the same bytes travel, the additions have one fixed order,
    and bf16 terms are added in fp32 and rounded once."""
    received = _exchange(tensor, group)
    sum_dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    return received.sum(dim=0, dtype=sum_dtype).to(tensor.dtype)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _add_and_scatter(gradients[0], ctx.group), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _add_and_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.group), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = gradients[0].chunk(dist.get_world_size(ctx.group), dim=-1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None
