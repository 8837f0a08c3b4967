"""The cross entropy of logits that are spread over ranks, against the one of whole logits."""

import pytest
import torch
import torch.distributed as dist

from model import loss
from model.loss import cross_entropy, parallel_cross_entropy
from model.process_grid import start_grid
from tests.helpers.distributed import run_distributed

COLUMNS = 36


def compare(dtype, vocab_size, ignored=5, poison=None, chunk=None, z_loss=0.0):
    grid = start_grid(dist.get_world_size())
    if chunk:
        loss.CHUNK_ELEMENTS["cpu"] = chunk
    generator = torch.Generator().manual_seed(0)
    whole = 30 * torch.randn(4, 9, COLUMNS, dtype=torch.float64, generator=generator)
    if poison is not None:
        whole[poison] = float("nan")
    whole = whole.to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (4, 9), generator=generator)
    labels.view(-1)[:ignored] = -100
    reported = []
    terms = (None, z_loss, lambda both: reported.append(both.tolist()))
    expected = cross_entropy(whole, labels, vocab_size, *terms)
    (3 * expected).backward()

    mine = whole.detach().chunk(grid.tensor_parallel, -1)[grid.tensor_rank].clone().requires_grad_()
    kept = mine.detach().clone()
    found = parallel_cross_entropy(mine, labels, vocab_size, grid, *terms)
    (3 * found).backward()
    loss.CHUNK_ELEMENTS["cpu"] = 2**20
    expected_gradient = whole.grad.chunk(grid.tensor_parallel, -1)[grid.tensor_rank]
    padding = mine.grad[..., max(0, vocab_size - grid.tensor_rank * mine.shape[-1]) :]
    return {
        "loss": found.item(),
        "expected": expected.item(),
        "terms": reported,
        "dtypes": (found.dtype == expected.dtype, mine.grad.dtype == dtype),
        "gradient": (mine.grad - expected_gradient).abs().max().item(),
        "untouched": torch.equal(mine, kept) or poison is not None,
        "padding": torch.count_nonzero(padding).item(),
    }


# The last of three ranks has padding only.
@pytest.mark.parametrize(("tensor_parallel", "vocab_size"), [(2, 36), (2, 31), (3, 20)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_loss_of_whole_logits(dtype, vocab_size, tensor_parallel):
    results = run_distributed(compare, tensor_parallel, dtype, vocab_size, chunk=2 * COLUMNS)
    assert len({found["loss"] for found in results}) == 1  # bit-identical on all ranks
    # The gradient's entries are at most 3/31. Logits of about 100 are exact to 4e-6 in fp32, and so is,
    # relatively, the softmax; bf16 rounds the gradient once, as it does for whole logits.
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3 / 31 * 2**-8}[dtype]
    for found in results:
        assert found["loss"] == pytest.approx(
            found["expected"], rel=1e-13 if dtype == torch.float64 else 1e-6
        )
        assert found["dtypes"] == (True, True) and found["untouched"] and found["padding"] == 0
        assert found["gradient"] <= tolerance


def test_the_terms_of_a_loss_with_a_z_loss_are_those_of_whole_logits():
    for found in run_distributed(compare, 2, torch.float64, 20, z_loss=0.1):
        whole, spread = found["terms"]
        assert spread == pytest.approx(whole, rel=1e-13) and sum(spread) == pytest.approx(found["loss"])
        assert found["gradient"] <= 1e-12, "whose factor of the softmax is up to 20"


def test_a_batch_without_labels_has_loss_zero():
    for found in run_distributed(compare, 2, torch.float32, 31, ignored=36):
        assert found["loss"] == 0 and found["gradient"] == 0


@pytest.mark.parametrize("column", [0, 30])  # on the first rank, on the last
def test_a_non_finite_logit_shows_on_every_rank(column):
    for found in run_distributed(compare, 4, torch.float32, 31, poison=(3, 3, column)):
        assert found["loss"] != found["loss"]
