"""Arrays of levels for designed experiments: every t columns hold every combination of levels equally often.

An array of strength 2 estimates main effects that are balanced over each other. At strength 3 two-factor
interactions do not disturb them, and at strength 4 these can be estimated as well (Hedayat, Sloane and
Stufken, Orthogonal Arrays, 1999).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import xor

import numpy as np
from numpy.typing import NDArray

from model.errors import UserError

Array = NDArray[np.int64]
"""Levels, counted from 0: (runs, factors)."""

ORDERS = (2, 4)
"""Of the finite fields whose arrays are built. Their elements are numbers whose bits are added one by one."""
PRODUCTS = {2: [[0, 0], [0, 1]], 4: [[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]]}
"""Of the elements of each field; that of four has x² = x + 1."""
MOST_RUNS = 4096


def full_factorial(levels: Sequence[int]) -> Array:
    """Every combination once; the last factor varies fastest.

    Args:
        levels: how many each factor has.
    """
    return np.array(list(itertools.product(*map(range, levels))), dtype=np.int64)


def orthogonal_array(levels: Sequence[int], runs: int, strength: int = 2) -> Array:
    """An array of *runs* rows and at least this strength, of the greatest that can be built here.

    Its columns are linear functions over a finite field whose order every number of levels divides (Rao,
    JRSS Supplement 9, 1947), chosen one by one so that any t are independent. For factors of two levels and a
    multiple of four that is no power of two it is Plackett and Burman's (Biometrika 33, 1946) from Paley's
    construction.

    Args:
        levels: how many each factor has, at least 2.

    Raises:
        UserError: no such array can be built without repeated rows; it says what could.
    """
    array = _built(levels, runs, strength)
    if array is None:
        raise UserError(f"study: runs: {runs:,} is not valid; {_list_possible(levels, strength)}")
    return array


def _built(levels: Sequence[int], runs: int, strength: int) -> Array | None:
    """The array, or None if it cannot be built here, or would hold a row twice."""
    array = None
    if set(levels) == {2} and strength == 2 and runs.bit_count() > 1:
        if _is_paley(runs) and len(levels) < runs:
            array = _paley(runs)[:, : len(levels)]
    elif order := _order(levels):
        digits = next((n for n in range(1, 13) if order**n == runs), 0)
        for tried in range(min(digits, len(levels)), strength - 1, -1):
            if columns := _columns(order, digits, tried, len(levels)):
                array = _rows(order, columns) * np.array(levels) // order
                break
    return None if array is None or len(np.unique(array, axis=0)) < runs else array


def _order(levels: Sequence[int]) -> int | None:
    """Of the smallest field that has an array for such factors; None without one."""
    return next((order for order in ORDERS if all(order % count == 0 for count in levels)), None)


def _list_possible(levels: Sequence[int], strength: int) -> str:
    """Which numbers of runs are valid."""
    counts = " and ".join(map(str, sorted(set(levels))))
    order = _order(levels)
    if order is None:
        return f"factors of {counts} levels have no array here; give 2 or 4 levels each, or method: grid"
    most = min(MOST_RUNS, math.prod(levels))
    tried = {order**n for n in range(1, 13) if order**n <= most} | set(range(12, min(most, 200) + 1, 4))
    fitting = [runs for runs in sorted(tried) if _built(levels, runs, strength) is not None][:6]
    if not fitting:
        return f"no array of strength {strength} has {len(levels)} such factors; give others, or method: grid"
    needed = f" and strength {strength}" if strength > 2 else ""
    takes = " or ".join(f"{runs:,}" for runs in fitting)
    return f"{len(levels)} factors of {counts} levels{needed} take {takes} runs"


def compute_strength(array: Array, levels: Sequence[int], most: int = 4) -> int:
    """The largest t up to *most* for which any t columns hold every combination equally often."""
    for t in range(1, min(most, array.shape[1]) + 1):
        for columns in itertools.combinations(range(array.shape[1]), t):
            found = Counter(map(tuple, array[:, columns].tolist()))
            combinations = math.prod(levels[column] for column in columns)
            if len(found) < combinations or len(set(found.values())) > 1:
                return t - 1
    return min(most, array.shape[1])


# ---------------------------------------------------------------------- linear arrays

Vector = tuple[int, ...]


def _columns(order: int, digits: int, strength: int, count: int) -> list[Vector] | None:
    """So many vectors of *digits* field elements of which any *strength* are independent; None if the search
    finds fewer.

    Each is the first, in order, that no combination of fewer than *strength* chosen ones gives: a lexicode.
    """
    if strength > digits:
        return None
    spans: list[set[Vector]] = [{(0,) * digits}, *(set() for _ in range(strength - 1))]
    chosen: list[Vector] = []
    for vector in _points(order, digits):
        if len(chosen) == count:
            break
        if any(vector in span for span in spans):
            continue
        chosen.append(vector)
        multiples = [tuple(PRODUCTS[order][a][x] for x in vector) for a in range(1, order)]
        for size in range(strength - 1, 0, -1):
            for start in list(spans[size - 1]):
                spans[size] |= {tuple(map(xor, start, step)) for step in multiples}
    return chosen if len(chosen) == count else None


def _points(order: int, digits: int) -> Iterator[Vector]:
    """Vectors whose first element that is not 0 is 1, the unit vectors first."""
    units = [tuple(int(i == place) for i in range(digits)) for place in range(digits)]
    yield from units
    for vector in itertools.product(range(order), repeat=digits):
        if next((x for x in vector if x), 0) == 1 and vector not in units:
            yield vector


def _rows(order: int, columns: Sequence[Vector]) -> Array:
    """The value of every column, a linear function, at every point; (order^digits, columns)."""
    products = np.array(PRODUCTS[order])
    points = full_factorial([order] * len(columns[0]))
    values = np.zeros((len(points), len(columns)), dtype=np.int64)
    for place, vector in enumerate(columns):
        for digit, factor in enumerate(vector):
            values[:, place] ^= products[factor, points[:, digit]]
    return values


# ---------------------------------------------------------------------- two levels


def _is_paley(runs: int) -> bool:
    """Whether runs - 1 is a prime that leaves 3 when divided by 4."""
    prime = runs - 1
    return runs % 4 == 0 and prime > 2 and all(prime % divisor for divisor in range(2, math.isqrt(prime) + 1))


def _paley(runs: int) -> Array:
    """The array of the quadratic residues of runs - 1: shifts of one row, and a row of the first level."""
    prime = runs - 1
    residues = {x * x % prime for x in range(prime)}
    shifts = [[int((column - row) % prime in residues) for column in range(prime)] for row in range(prime)]
    return np.array([*shifts, [0] * prime], dtype=np.int64)
