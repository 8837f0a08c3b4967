"""Newton-Schulz iterations against the same in fp64, and against the orthogonal factor that they approach."""

import math

import pytest
import torch

from pretrain.config.sections import MuonConfig
from pretrain.optim.muon import MuonAndAdamW, matrix_update, orthogonalize, update_size
from tests.pretrain.optim.reference import newton_schulz

SHAPES = [(64, 64), (48, 192), (192, 48), (1, 40), (40, 1), (128, 4096)]


def drawn(rows, cols, smallest=None):
    """A matrix fp32; with *smallest*, its singular values fall evenly (in their logarithm) from 1 to it."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    matrix = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if smallest is not None:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        matrix = left * torch.logspace(0, math.log10(smallest), len(values)).double() @ right
    return matrix.float()


@pytest.mark.parametrize("length", [1e-12, 1e12])
@pytest.mark.parametrize("smallest", [None, 1e-3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_iteration_is_that_of_fp64(shape, smallest, length):
    matrix = drawn(*shape, smallest) * length
    expected = newton_schulz(matrix)
    difference = torch.linalg.matrix_norm(orthogonalize(matrix).double() - expected)
    assert difference <= 1e-5 * torch.linalg.matrix_norm(expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_bf16_it_differs_by_a_few_percent(shape):
    matrix = drawn(*shape, 0.1)
    expected = newton_schulz(matrix)
    difference = torch.linalg.matrix_norm(orthogonalize(matrix, torch.bfloat16).double() - expected)
    assert difference <= 0.02 * torch.linalg.matrix_norm(expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_come_near_one(shape):
    """The direction is U V^T up to the values, which are within 0.68 and 1.21 where the smallest one is above
    1/200 of the Frobenius norm: a relative error of at most 0.32."""
    matrix = drawn(*shape, 0.1).double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values.min() > 5e-3 * torch.linalg.matrix_norm(matrix)
    diagonal = left.mT @ orthogonalize(matrix.float()).double() @ right.mT
    assert diagonal.diagonal().min() > 0.68 and diagonal.diagonal().max() < 1.21
    assert (diagonal - torch.diag(diagonal.diagonal())).abs().max() < 1e-5


def test_small_directions_stay_small():
    """Five steps multiply a small singular value by at most 3.4445^5 = 485."""
    matrix = torch.diag(torch.tensor([1.0, 1e-5]))
    assert torch.linalg.svdvals(orthogonalize(matrix))[1] == pytest.approx(485e-5, rel=0.01)


def test_zero_stays_zero_and_matrices_of_a_batch_are_apart():
    batch = torch.stack([drawn(8, 24), torch.zeros(8, 24), drawn(8, 24) * 1e-6])
    found = orthogonalize(batch)
    assert not found[1].any()
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "size"), [("rms", 0.2 * math.sqrt(48)), ("spectral", math.sqrt(12 / 48)), ("unit", 1)]
)
@pytest.mark.parametrize("columns", [False, True])
def test_heads_are_made_orthogonal_by_themselves(columns, scale, size):
    """q, k, v by rows; o by columns, where a head has 48 rows and 12 columns."""
    matrix = drawn(48, 36) if columns else drawn(36, 48)
    found = matrix_update(matrix, MuonConfig(heads="each", scale=scale), (int(columns), 12))
    if columns and scale == "spectral":
        size = math.sqrt(48 / 12)
    for head in range(3):
        part = slice(12 * head, 12 * head + 12)
        block, update = (m[:, part] if columns else m[part] for m in (matrix, found))
        expected = size * newton_schulz(block)
        torch.testing.assert_close(update.double(), expected, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize(
    ("scale", "size"), [("rms", 0.2 * math.sqrt(48)), ("spectral", math.sqrt(6 / 48)), ("unit", 1)]
)
def test_the_last_group_of_heads_has_its_own_size(scale, size):
    """Five heads of six rows in groups of two: the last group is one head."""
    matrix = drawn(30, 48)
    found = matrix_update(matrix, MuonConfig(heads=2, scale=scale), (0, 12))
    torch.testing.assert_close(found[24:].double(), size * newton_schulz(matrix[24:]), rtol=1e-4, atol=1e-5)


def test_update_of_rms_has_the_size_of_adamws():
    found = matrix_update(drawn(64, 256), MuonConfig())
    assert found.square().mean().sqrt() == pytest.approx(0.2 * 0.9, rel=0.1)
    assert update_size("rms", 64, 256) == update_size("rms", 256, 64) == pytest.approx(3.2)


def test_the_momentum_of_a_frozen_matrix_goes_on():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    groups = [{"params": [weight], "kind": "muon", "lr": 0.0, "weight_decay": 0.1}]
    optimizer = MuonAndAdamW(groups, MuonConfig(momentum=0.9), lr=0.1)
    optimizer.updates = lambda master, update: None
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2, 3))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.full((2, 3), 0.1))
