"""Head schedules: one head count per layer, written ``3x2,6x2,8x2,12x6`` (heads x layers)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from model.allocations import MOST_LAYERS, parse_allocation
from model.errors import UserError, quote

HeadSchedule = tuple[int, ...]

BARS = "▁▂▃▄▅▆▇█"
_TERM = re.compile(r"\s*(null|0|[1-9]\d{0,9})\s*(?:x\s*([1-9]\d{0,9})\s*)?", re.ASCII)


def parse_heads(text: str) -> HeadSchedule:
    """Read a head schedule: comma-separated terms ``h`` (one layer) or ``hxN`` (N layers of h heads).

    ``"3x2,6,12"`` is ``(3, 3, 6, 12)``. Blanks around terms, and brackets around them all, are ignored.
    Raises UserError for anything else: an empty term, a non-number, a number below 0, more than MOST_LAYERS
    layers.
    """
    schedule = parse_schedule(text, "heads")
    if None in schedule:
        raise _count_error("heads", "null", text)
    return tuple(heads for heads in schedule if heads is not None)


def parse_schedule(text: str, name: str) -> tuple[int | None, ...]:
    """Read a schedule of integers as ``parse_heads`` does. ``null`` stands for a layer without a value. An
    allocation that gives the number of layers, such as tapered(8, layers=12), is also accepted.

    Args:
        name: of the field, which begins the messages.
    """
    if "(" in text:
        return parse_allocation(text, name, multiple=1).widths()
    schedule: list[int | None] = []
    stripped = text.strip()
    terms = stripped[1:-1] if stripped[:1] + stripped[-1:] == "[]" else text
    for term in terms.split(","):
        found = _TERM.fullmatch(term)
        if not found:
            raise _count_error(name, term.strip(), text)
        layers = int(found[2] or 1)
        if len(schedule) + layers > MOST_LAYERS:
            raise UserError(f"{name}: {quote(text)} has more than {MOST_LAYERS:,} layers; give at most that")
        schedule += [None if found[1] == "null" else int(found[1])] * layers
    return tuple(schedule)


def _count_error(name: str, term: str, text: str) -> UserError:
    wrong = "not a head count; write h or hxN" if name == "heads" else "not valid; give n or nxN"
    return UserError(
        f"{name}: {quote(term)} in {quote(text)} is {wrong} with whole numbers, for example 3x2,6x2,8x2,12x6"
    )


def normalize_heads(value: Any) -> Any:
    """A head schedule, given as text or as a list of head counts, in its shortest text: ``"2,4,8x2"``. What
    is neither stays as it is."""
    if type(value) is int:
        value = str(value)
    elif isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return format_heads(parse_heads(value)) if isinstance(value, str) else value


def format_heads(heads: Iterable[int]) -> str:
    """Write a schedule run-length encoded (a run of one is bare): ``parse_heads(format_heads(s)) == s``."""
    runs = [(count, len(list(run))) for count, run in groupby(heads)]
    return ",".join(f"{count}x{length}" if length > 1 else f"{count}" for count, length in runs)


def draw_heads(heads: Sequence[int]) -> str:
    """A schedule as a small drawing, a column a layer, the tallest for the most heads: ▂▄██ for 2,4,8x2, a
    blank for 0."""
    most = max(heads)
    return "".join(BARS[-(-len(BARS) * count // most) - 1] if count else " " for count in heads)


def make_uniform(heads: int, num_layers: int) -> HeadSchedule:
    """The same head count in every layer."""
    return (heads,) * num_layers


def sort_ascending(multiset: Iterable[int]) -> HeadSchedule:
    """Few (wide) heads first: the order of the Prism Transformer (arXiv 2606.27449)."""
    return tuple(sorted(multiset))


def sort_descending(multiset: Iterable[int]) -> HeadSchedule:
    """Many (narrow) heads first: the control that has the same mean head count as ``sort_ascending``."""
    return tuple(sorted(multiset, reverse=True))


def shuffle(multiset: Iterable[int], seed: int) -> HeadSchedule:
    """The multiset in a seeded random order, which depends on the counts and the seed only."""
    heads = sorted(multiset)
    random.Random(seed).shuffle(heads)
    return tuple(heads)
