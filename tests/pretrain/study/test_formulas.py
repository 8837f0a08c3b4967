"""Formulas of contrasts: what they weigh, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from pretrain.study.formulas import read_contrasts
from tests.helpers.refusals import refused

LEVELS = {
    "width": ("small", "large"),
    "optimizer.learning_rate": ("0.001", "0.002"),
    "variant": ("up", "down", "flat-2", "flat-4"),
}
ROWS = {".".join(row): row for row in itertools.product(*LEVELS.values())}


def weights(formula, levels=LEVELS, rows=ROWS):
    (found,) = read_contrasts({"x": formula}, None, levels, rows)
    return found


def value(formula):
    """The formula's value where a variant is worth the product of numbers of its levels."""
    worth = {"small": 2, "large": 3, "0.001": 5, "0.002": 7, "up": 11, "down": 13, "flat-2": 17, "flat-4": 19}
    return sum(
        weight * worth[a] * worth[b] * worth[c]
        for name, weight in weights(formula).weights.items()
        for a, b, c in [ROWS[name]]
    )


MEAN = 2.5 * 6  # over widths and rates


@pytest.mark.parametrize(
    ("formula", "expected", "order"),
    [
        ("up - down", MEAN * (11 - 13), 1),
        ("(up − down)", MEAN * (11 - 13), 1),
        ("- down + up", MEAN * (11 - 13), 1),
        ("small.up - large.up", 6 * 11 * (2 - 3), 2),
        ("up.small - up.large", 6 * 11 * (2 - 3), 2),
        ("small.0.001.up - large.0.002.up", 11 * (2 * 5 - 3 * 7), 3),
        ("optimizer.learning_rate=2e-3 - optimizer.learning_rate=1e-3", 2.5 * 15 * (7 - 5), 1),
        ("2e-3.up - 1e-3.up", 2.5 * 11 * (7 - 5), 2),
        ("(small.up - small.down) - (large.up - large.down)", 6 * -2 * (2 - 3), 2),
        ("mean(flat-*, up) - down", MEAN * ((17 + 19 + 11) / 3 - 13), 1),
        ("flat-* - down", MEAN * (18 - 13), 1),
        ("(up + down) / 2 - flat-2", MEAN * (12 - 17), 1),
        ("0.5 * up + 0.5 * down - flat-2", MEAN * (12 - 17), 1),
    ],
)
def test_the_effect_is_what_the_formula_says(formula, expected, order):
    assert value(formula) == pytest.approx(expected)
    assert weights(formula).order == order


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("up - donw", "contrasts.x: 'donw' is not valid; did you mean 'down'"),
        ("-down + up", "'-down' is not valid"),
        ("zz - up", "contrasts.x: 'zz' is not valid; variants are small.0.001.up, "),
        ("up", "its weights add up to 1; those of a contrast add up to 0"),
        ("up - up", "it subtracts variants from themselves"),
        ("up - 2 * down", "its weights add up to -1"),
        ("(up - down", "close every bracket"),
        ("up -", "separate names by + and -"),
        ("up - (down))", "close every bracket"),
        ("up down", "separate names by + and -, each between spaces"),
        ("up-down", "'up-down' is not valid"),
        ("mean(up down) - up", "'up down' is not valid"),
        ("up * down - up", "numbers stand before * or behind /"),
        ("up / 2 * down - up", "numbers stand before * or behind /"),
        ("up , - down", "',' is not valid"),
        ("up - down / up", "numbers stand before * or behind /"),
        ("up - down / 0", "'0' is not valid"),
        ("width=big - up", "'width=big' is not valid; levels of width are small, large"),
        ("", "separate names by + and -"),
    ],
)
def test_bad_formulas_are_one_line(formula, said):
    with refused(said, begins="study: contrasts.x: "):
        weights(formula)


def test_a_level_of_two_factors_needs_its_factor():
    levels = {"heads[0]": ("2", "4"), "heads[1]": ("2", "4")}
    rows = {".".join(row): row for row in itertools.product(*levels.values())}
    with refused("'2' is not valid; several factors have this level; give heads[0]=2 or heads[1]=2"):
        weights("2 - 4", levels, rows)
    assert weights("heads[1]=2 - heads[1]=4", levels, rows).weights == pytest.approx(
        {"2.2": 0.5, "4.2": 0.5, "2.4": -0.5, "4.4": -0.5}
    )


def test_primary_ones_are_named():
    formulas = {"a": "up - down", "b": "up - flat-2"}
    found = read_contrasts(formulas, ["b"], LEVELS, ROWS)
    assert [each.primary for each in found] == [False, True]
    assert all(each.primary for each in read_contrasts(formulas, None, LEVELS, ROWS))
    with refused("primary: 'c' is not valid; give names of contrasts"):
        list(read_contrasts(formulas, ["c"], LEVELS, ROWS))
    with refused("contrasts: ' ' is not valid"):
        list(read_contrasts({" ": "up - down"}, None, LEVELS, ROWS))
