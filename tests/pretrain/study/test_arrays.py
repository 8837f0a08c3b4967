"""Balance of the arrays, counted column by column, and what cannot be built."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from pretrain.study.arrays import compute_strength, orthogonal_array
from tests.helpers.refusals import refused

ARRAYS = [
    ([4] * 5, 16, 2),
    ([4] * 4, 64, 3),
    ([4] * 6, 64, 3),
    ([4] * 21, 64, 2),
    ([4] * 5, 256, 4),
    ([2] * 11, 12, 2),
    ([2] * 19, 20, 2),
    ([2] * 8, 16, 3),
    ([2] * 5, 16, 4),
    ([2, 4, 4, 2], 16, 2),
]


@pytest.mark.parametrize(("levels", "runs", "strength"), ARRAYS)
def test_columns_hold_every_combination_equally_often(levels, runs, strength):
    array = orthogonal_array(levels, runs)
    assert array.shape == (runs, len(levels))
    assert len({tuple(row) for row in array.tolist()}) == runs
    for columns in itertools.combinations(range(len(levels)), strength):
        found = Counter(tuple(row[column] for column in columns) for row in array.tolist())
        combinations = itertools.product(*(range(levels[column]) for column in columns))
        assert dict(found) == dict.fromkeys(combinations, runs // np.prod([levels[c] for c in columns]))
    assert compute_strength(array, levels) == strength


def test_strength_of_arrays_that_are_not_balanced():
    assert compute_strength(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), [2, 2]) == 2
    assert compute_strength(np.array([[0, 0], [1, 1]]), [2, 2]) == 1
    assert compute_strength(np.array([[0, 0], [0, 1], [1, 0]]), [2, 2]) == 0
    assert compute_strength(np.array([[0, 0], [1, 1], [0, 0], [1, 1]]), [2, 3]) == 0  # a level is missing


@pytest.mark.parametrize(
    ("levels", "runs", "strength", "said"),
    [
        ([4] * 6, 16, 2, "runs: 16 is not valid; 6 factors of 4 levels take 64 or 256"),
        ([4] * 4, 20, 2, "4 factors of 4 levels take 16 or 64 or 256 runs"),
        ([4] * 7, 64, 3, "7 factors of 4 levels and strength 3 take 256 or"),
        ([2] * 12, 12, 2, "12 factors of 2 levels take 16 or 20 or 24"),
        ([4, 3], 12, 2, "factors of 3 and 4 levels have no array here; give 2 or 4 levels each"),
        ([4] * 4, 1024, 2, "runs: 1,024 is not valid"),  # rows would be repeated
        ([2, 2], 12, 2, "2 factors of 2 levels take 4 runs"),
    ],
)
def test_what_cannot_be_built_is_said(levels, runs, strength, said):
    with refused(said):
        orthogonal_array(levels, runs, strength)
