"""The keyed permutation behind the order of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.sequences import Permutation


@given(st.integers(1, 600), st.text(max_size=5))
def test_it_is_a_permutation(size, key):
    permutation = Permutation(size, key)
    assert sorted(permutation(index) for index in range(size)) == list(range(size))


def test_it_never_changes():
    """Resumed and repeated runs rely on these values: they hold on every machine and in every version."""
    assert [Permutation(1000, "key")(index) for index in range(8)] == [781, 478, 463, 455, 1, 862, 608, 867]
    large = Permutation(10**12 + 39, "key")
    assert [large(index) for index in (0, 1, 10**12)] == [724448152527, 13227488723, 759600650290]


def test_it_looks_random():
    """Fixed points, neighbours and positions behave as in a uniform permutation (bounds: 5 standard
    deviations)."""
    size = 5000
    orders = np.array([[Permutation(size, f"{key}")(index) for index in range(size)] for key in range(4)])
    assert (orders == np.arange(size)).sum(axis=1).max() <= 1 + 5
    assert (np.abs(np.diff(orders)) == 1).sum(axis=1).max() <= 2 + 5 * 2**0.5
    correlations = np.corrcoef(np.vstack([orders, np.arange(size)]))
    assert np.abs(correlations - np.eye(5)).max() < 5 / size**0.5


def test_indices_outside_are_errors():
    for index in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, "")(index)
