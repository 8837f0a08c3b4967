"""The residual energy against its definition, and its extreme eigenpairs against a full decomposition."""

import math

import pytest
import scipy.sparse.linalg
import torch

from pretrain.config.growth import GrowthConfig
from pretrain.growth.check import Check, LayerMeasure
from pretrain.growth.record import GrowthState
from pretrain.growth.spectrum import (
    extend_basis,
    extremes,
    head_energies,
    project_out,
    residual,
    skew_product,
)


def moment(d, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4 * d, d, generator=generator) @ torch.randn(d, d, generator=generator)
    return rows.T @ rows / len(rows)


def weights(rows, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, d, generator=generator), torch.randn(rows, d, generator=generator)


@pytest.mark.parametrize("d", [4, 48, 256])
def test_the_facts_of_the_algebra(d):
    query, key = weights(8, d, 1)
    skew, c = skew_product(query, key), moment(d, 2)
    by_heads = sum(q.T @ k for q, k in zip(query.split(4), key.split(4), strict=True))
    torch.testing.assert_close(skew, (by_heads - by_heads.T) / 2)
    energy = residual(c, skew, torch.zeros(0, d)).double()
    torch.testing.assert_close(energy, energy.T)
    commutator = (c @ skew - skew @ c).double() / 2
    torch.testing.assert_close(energy, commutator, rtol=1e-4, atol=1e-3 * commutator.abs().max().item())
    assert abs(torch.trace(energy)) < 1e-5 * torch.linalg.matrix_norm(energy)
    eigenvalues = torch.linalg.eigvalsh(c.double())
    bound = (eigenvalues[-1] - eigenvalues[0]) / 2 * torch.linalg.matrix_norm(skew.double(), 2)
    assert torch.linalg.matrix_norm(energy, 2) <= bound * (1 + 1e-6)
    isotropic = residual(3 * torch.eye(d), skew, torch.zeros(0, d))
    assert isotropic.abs().max() <= 1e-5 * skew.abs().max()


def distance(found, expected):
    """‖u − û‖ of two unit vectors whose signs are arbitrary."""
    return min(torch.linalg.vector_norm(found.double() - sign * expected).item() for sign in (1, -1))


@pytest.mark.parametrize("d", [3, 16, 64, 384])
@pytest.mark.parametrize("seed", range(3))
def test_extremes_are_those_of_a_full_decomposition(d, seed):
    query, key = weights(16, d, seed)
    energy = residual(moment(d, seed + 9), skew_product(query, key), torch.zeros(0, d))
    found = extremes(energy)
    values, vectors = torch.linalg.eigh(energy.double())
    assert found.largest == pytest.approx(values[-1].item(), rel=1e-3)
    assert found.smallest == pytest.approx(values[0].item(), rel=1e-3)
    if (values[-1] - values[-2]) / values[-1] >= 0.1:
        assert distance(found.top, vectors[:, -1]) < 0.01
    if (values[0] - values[1]) / values[0] >= 0.1:
        assert distance(found.bottom, vectors[:, 0]) < 0.01
    again = extremes(energy, found.top)  # an eigenvector as a start must not end the iteration
    assert again.largest == pytest.approx(found.largest, rel=1e-3)


@pytest.mark.parametrize(("d", "most"), [(16, 17), (64, 39), (384, 39), (768, 39)])
def test_so_many_products_with_vectors_are_enough(monkeypatch, d, most):
    """A relative gap of 0.1 at both ends."""
    products, original = [], scipy.sparse.linalg.eigsh

    def counted(matrix, **options):
        def product(vector):
            products.append(1)
            return matrix @ vector

        return original(scipy.sparse.linalg.LinearOperator(matrix.shape, product, dtype=float), **options)

    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", counted)
    basis = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(d)).double()).Q
    values = torch.cat([torch.tensor([-3.0]), torch.linspace(-2.7, 3.6, d - 2), torch.tensor([4.0])]).double()
    found = extremes((basis * values) @ basis.T)
    assert (found.largest, found.smallest) == pytest.approx((4.0, -3.0), rel=1e-3)
    assert distance(found.top, basis[:, -1]) < 0.01 and distance(found.bottom, basis[:, 0]) < 0.01
    assert 0 < len(products) <= most


def test_nothing_has_no_direction():
    found = extremes(torch.zeros(12, 12))
    assert (found.largest, found.smallest) == (0, 0) and not found.top.any()


def test_equal_eigenvalues_give_equal_bits():
    """The iteration is restarted with random vectors where it ends early."""
    energy = torch.diag(torch.tensor([2.0, 2.0, -1.0, *[0.0] * 61]))
    first, second = extremes(energy), extremes(energy)
    assert torch.equal(first.top, second.top) and torch.equal(first.bottom, second.bottom)
    assert (first.largest, first.smallest) == pytest.approx((2.0, -1.0))


def test_where_the_iteration_fails_a_full_decomposition_takes_its_place(monkeypatch):
    def fails(*args, **options):
        raise scipy.sparse.linalg.ArpackError(-9)

    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", fails)
    energy = residual(moment(16, 1), skew_product(*weights(16, 16, 2)), torch.zeros(0, 16))
    values, vectors = torch.linalg.eigh(energy.double())
    found = extremes(energy)
    assert (found.largest, found.smallest) == pytest.approx((values[-1].item(), values[0].item()))
    assert abs(found.top.double() @ vectors[:, -1]) > 0.9999


def test_the_projector_stays_exact_over_200_growths():
    d = 256
    generator = torch.Generator().manual_seed(3)
    captured = torch.zeros(0, d)
    for _ in range(200):
        # Nearly parallel to what is captured already: the hard case.
        direction = torch.randn(d, generator=generator) * 1e-2
        if len(captured):
            direction = direction + captured[-1]
        captured = extend_basis(captured, direction)
    gram = (captured.double() @ captured.double().T - torch.eye(200)).abs().max()
    assert gram < 1e-6
    matrix = moment(d, 4)
    once = project_out(matrix, captured)
    assert (once @ captured.T).abs().max() < 1e-4 * matrix.abs().max()
    torch.testing.assert_close(
        project_out(once, captured), once, atol=1e-4 * matrix.abs().max().item(), rtol=0
    )
    with pytest.raises(ValueError, match="captured already"):
        extend_basis(captured, captured[7])


def test_head_energies_are_the_norms_of_their_matrices():
    d, c = 32, moment(32, 5)
    query, key = weights(12, d, 6)
    expected = [
        torch.linalg.matrix_norm(c @ skew_product(q, k)).item()
        for q, k in zip(query.split(4), key.split(4), strict=True)
    ]
    assert head_energies(c, query, key, 4) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(head_energies(c, query * math.nan, key, 4)[0])  # not 0, which would be pruned


def grown_heads(config, energy, most, start=1):
    """Heads and captured directions of a layer after 50 checks in which C and M_a stay, so that only P
    changes."""
    state, captured, heads = GrowthState.begin([start]), [torch.zeros(0, len(energy))], [start]
    for step in range(50):
        left = project_out(energy, captured[0])
        measure = LayerMeasure(left, torch.linalg.matrix_norm(left).item(), extremes(left), [9.0] * heads[0])
        Check(config, most, 1, heads, state, [measure], captured).decide(step, {})
    return heads[0], captured[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("above", [0, 1, 5, 9])
def test_exactly_as_many_heads_as_eigenvalues_above_the_threshold(above, seed):
    """C and W_Q, W_K fixed, so that only the projector changes: a head for each of *above* eigenvalues, and
    no more.

    In a plane of two eigenvectors of C with eigenvalues a and b, a head with q = u and k = m v has ½ [C, M_a]
    with the eigenvalues ± m (a − b) / 4.
    """
    d, threshold, planes = 24, 1.0, 12
    basis = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed)).double()).Q
    variances = 1 + torch.arange(d, dtype=torch.float64) % 2  # 1 and 2 in every plane
    moment_of_c = (basis * variances) @ basis.T
    energies = torch.cat([torch.linspace(1.5, 4, above), torch.linspace(0.1, 0.9, planes - above)]).double()
    query, key = basis.T[0::2], 4 * energies[:, None] * basis.T[1::2]
    skew = skew_product(query, key)
    values = torch.linalg.eigvalsh((moment_of_c @ skew - skew @ moment_of_c) / 2)
    torch.testing.assert_close(values.sort().values, torch.cat([energies, -energies]).sort().values)
    energy = residual(moment_of_c, skew, torch.zeros(0, d)).float()
    config = GrowthConfig(criterion="incrt", grow_above=threshold, dwell=0)
    heads, captured = grown_heads(config, energy, most=100)
    assert heads == 1 + above and len(captured) == above


def test_extreme_thresholds_stop_at_the_bounds():
    d = 12
    config = GrowthConfig(criterion="incrt", grow_above=1e18, prune_below=1e17, dwell=0, patience=1)
    energy = torch.diag(torch.linspace(-1, 1, d))
    assert grown_heads(config, energy, most=5, start=3)[0] == 1
    config = GrowthConfig(criterion="incrt", grow_above=1e-30, prune_share=0, dwell=0)
    assert grown_heads(config, energy, most=5)[0] == 5
    assert grown_heads(config, energy, most=100)[0] == 1 + d // 2  # half of the eigenvalues are positive
