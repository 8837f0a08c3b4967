"""A covering array: few configurations in which every feasible pair of levels of two settings occurs.

A greedy search like AETG's (Cohen and others 1997, IEEE Transactions on Software Engineering 23, 437): each
configuration is built around a pair that is still missing, setting by setting in a random order, with the
level that covers most; the best of several candidates is taken. The same seed gives the same array.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

Levels = Mapping[str, Sequence[str]]
"""The levels of each setting. The first goes with everything. Of levels that cover as much the earlier is
taken, so put the expensive ones last."""
Configuration = Mapping[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two (setting, level), in the order of their names."""
CANDIDATES = 10


def contradicts(chosen: Configuration, infeasible: Iterable[Configuration]) -> bool:
    """Whether *chosen*, of some settings or all, contains one of the *infeasible* combinations."""
    return any(all(chosen.get(name) == level for name, level in each.items()) for each in infeasible)


def pairs_of(chosen: Configuration) -> Iterable[Pair]:
    """The pairs of levels in a configuration."""
    return itertools.combinations(sorted(chosen.items()), 2)


def feasible_pairs(settings: Levels, infeasible: Collection[Configuration]) -> list[Pair]:
    """Every pair of levels of two settings, without the infeasible ones: settings that are not in a pair can
    have their first level, which goes with everything."""
    pairs = [
        ((first, level), (second, other))
        for first, second in itertools.combinations(sorted(settings), 2)
        for level, other in itertools.product(settings[first], settings[second])
    ]
    return [pair for pair in pairs if not contradicts(dict(pair), infeasible)]


def covering_array(settings: Levels, infeasible: Collection[Configuration], seed: int) -> list[Configuration]:
    """Configurations that together contain every feasible pair and no infeasible combination.

    Args:
        infeasible: combinations of levels that do not go together; none contains the first level of a
            setting.
    """
    for each in infeasible:
        assert all(level in settings[name][1:] for name, level in each.items()), each
    draw, array = random.Random(seed), []
    missing = dict.fromkeys(feasible_pairs(settings, infeasible))
    while missing:
        candidates = [_candidate(settings, infeasible, missing, draw) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda candidate: sum(pair in missing for pair in pairs_of(candidate)))
        array.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return array


def _candidate(
    settings: Levels,
    infeasible: Collection[Configuration],
    missing: Mapping[Pair, None],
    draw: random.Random,
) -> Configuration:
    """A feasible configuration with at least one of the *missing* pairs."""
    chosen = dict(draw.choice(list(missing)))
    rest = [name for name in settings if name not in chosen]
    draw.shuffle(rest)
    for name in rest:
        feasible = [level for level in settings[name] if not contradicts({**chosen, name: level}, infeasible)]
        chosen[name] = max(feasible, key=lambda level: _gain((name, level), chosen, missing))
    return {name: chosen[name] for name in settings}


def _gain(item: tuple[str, str], chosen: Configuration, missing: Mapping[Pair, None]) -> int:
    """How many missing pairs *item* would make with what is chosen."""
    return sum((min(item, other), max(item, other)) in missing for other in chosen.items())
