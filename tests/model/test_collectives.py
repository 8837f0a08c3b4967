"""Collectives under autograd: values, and each backward pass is the transpose of the forward one."""

import pytest
import torch
import torch.distributed as dist

from model import collectives
from tests.helpers.distributed import run_distributed

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def values(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = (
        (torch.arange(size * 2, dtype=dtype).view(size, 2) + 10 * rank).t().contiguous().t()
    )  # not contiguous
    world = dist.group.WORLD
    found = {
        "copy": collectives.copy_to_ranks(mine, world),
        "sum": collectives.sum_over_ranks(mine, world),
        "all_to_all": collectives.all_to_all(mine, world),
        "all_gather": collectives.all_gather(mine[0], world),
        "sum_scatter": collectives.sum_scatter(mine, world),
        "gather_last": collectives.gather_last(mine, world),
    }
    base = torch.arange(size * 2, dtype=dtype).view(size, 2)
    everyone = [base + 10 * other for other in range(size)]
    expected = {
        "copy": mine,
        "sum": sum(everyone),
        "all_to_all": torch.stack([other[rank] for other in everyone]),
        "all_gather": torch.stack([other[0] for other in everyone]),
        "sum_scatter": sum(everyone)[rank],
        "gather_last": torch.cat(everyone, dim=-1),
    }
    assert torch.equal(mine, base + 10 * rank)  # nothing is written into an argument
    return {name: (torch.equal(found[name], expected[name]), found[name].dtype == dtype) for name in found}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype):
    for found in run_distributed(values, 3, dtype):
        assert set(found.values()) == {(True, True)}, found


def adjoint(name):
    """<f(x), y> = <x, backward(y)>, both inner products taken over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(size, 4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    result = getattr(collectives, name)(x, dist.group.WORLD)
    y = torch.randn(result.shape, dtype=torch.float64, generator=generator)
    result.backward(y)
    products = torch.stack([(result * y).sum(), (x * x.grad).sum()]).detach()
    dist.all_reduce(products)
    return products.tolist()


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "sum_scatter"])
def test_backward_is_the_transpose(name):
    for forward, backward in run_distributed(adjoint, 3, name):
        assert forward == pytest.approx(backward, rel=1e-13)


def replicated_gradients():
    """Copy and sum, and the gather of what all ranks then use alike: gradients of a replicated loss."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    weights = torch.arange(1.0, size + 1, dtype=torch.float64)
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    collectives.sum_over_ranks(collectives.copy_to_ranks(x, world) ** 2 * weights[rank], world).backward()
    part = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    whole = collectives.gather_last(part, world)
    (whole**2).sum().backward()
    return x.grad.item(), part.grad.tolist()


def test_gradients_of_a_loss_that_all_ranks_have():
    for rank, (x, part) in enumerate(run_distributed(replicated_gradients, 3)):
        assert x == 2 * 3.0 * (1 + 2 + 3)
        assert part == [2 * (rank + 1.0)] * 2
