"""Blends: parsed as written, split exactly."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.sequences import BlendSplitter, parse_blend

weight_lists = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@given(weight_lists, st.integers(0, 2000))
def test_counts_follow_the_weights_and_never_drift(weights, first):
    """After any n sequences corpus i has got n·w_i up to half a sequence per level of the tree (4 for 9
    corpora)."""
    split, total = BlendSplitter(weights), sum(weights)
    assigned: Counter[int] = Counter()
    for number in range(first + 100):
        index, local = split(number)
        assert local == assigned[index]
        assigned[index] += 1
        if number >= first:
            for index, weight in enumerate(weights):
                assert abs(assigned[index] - Fraction((number + 1) * weight, total)) <= 2
    period = Counter(split(number)[0] for number in range(total))
    assert period == dict(enumerate(weights)), "a whole period is exact"


def test_far_numbers_cost_no_more():
    split = BlendSplitter([Fraction(1, 3), Fraction(2, 3)])
    index, local = split(3 * 10**15)
    assert (index, local) == (1, 2 * 10**15)


def test_it_never_changes():
    """Resumed and repeated runs rely on this order."""
    expected = [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (0, 3), (2, 1)]
    assert [BlendSplitter([0.5, 0.3, 0.2])(number) for number in range(8)] == expected


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [0.0]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(UserError, match="positive"):
        BlendSplitter(weights)


def test_blends_are_parsed_exactly():
    assert parse_blend("a:0.7,b:0.3") == [("a", Fraction(7, 10)), ("b", Fraction(3, 10))]
    assert parse_blend("a:1/3, x/b:2/3") == [("a", Fraction(1, 3)), ("x/b", Fraction(2, 3))]
    assert parse_blend("data/a") == [("data/a", Fraction(1))]
    assert parse_blend("data/a:1") == [("data/a", Fraction(1))]
    assert parse_blend("a:0.333333,b:0.333333,c:0.333333")[0] == ("a", Fraction(333333, 10**6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no corpus given"),
        ("a,b", "'a' has no weight"),
        ("a:0.5,b", "'b' has no weight"),
        ("a:x,b:0.5", "'x' is not a weight for 'a'"),
        ("a:-1,b:2", "'-1' is not a weight"),
        ("a:0,b:1", "'0' is not a weight"),
        ("a:1/0,b:1", "'1/0' is not a weight"),
        ("a:nan,b:1", "'nan' is not a weight"),
        ("a:0.7,b:0.2", r"sum to 9/10, not to 1; in the same ratio: a:7/9,b:2/9"),
        ("a:7,b:3", r"sum to 10, not to 1; in the same ratio: a:7/10,b:3/10"),
        ("a:0.5", "sum to 1/2"),
    ],
)
def test_bad_blends_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_blend(text)
