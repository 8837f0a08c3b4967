"""Head schedules: one head count per layer, written ``3x2,6x2,8x2,12x6`` (heads x layers)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from model.allocations import MOST_LAYERS, parse_allocation
from model.errors import UserError, naming, quote

HeadSchedule = tuple[int, ...]

BARS = "▁▂▃▄▅▆▇█"
_NUMBERS = {int: r"0|[1-9]\d{0,9}", float: r"(?:\d{1,20}\.?\d{0,20}|\.\d{1,20})(?:[eE][-+]?\d{1,3})?"}
_TERMS = {
    kind: re.compile(rf"\s*(null|{number})\s*(?:x\s*([1-9]\d{{0,9}})\s*)?", re.ASCII)
    for kind, number in _NUMBERS.items()
}
Number = TypeVar("Number", int, float)


def parse_heads(text: str, layers: int | None = None, field: str = "heads") -> HeadSchedule:
    """Read a head schedule: comma-separated terms ``h`` (one layer) or ``hxN`` (N layers of h heads), or an
    allocation such as tapered(8), which has *layers* layers where it does not give them.

    ``"3x2,6,12"`` is ``(3, 3, 6, 12)``. Blanks around terms, and brackets around them all, are ignored.
    Raises UserError, which names *field*, for anything else: an empty term, a non-number, a number below 0,
    more than MOST_LAYERS layers.
    """
    with naming(field, text):
        if "(" in text:
            return parse_allocation(text, multiple=1).widths(layers)
        schedule = parse_schedule(text)
        if None in schedule:
            raise _wrong_term("null", int)
    return tuple(heads for heads in schedule if heads is not None)


def parse_schedule(text: str, number: type[Number] = int) -> tuple[Number | None, ...]:
    """Read a schedule of numbers as ``parse_heads`` does. ``null`` stands for a layer without a value. An
    allocation that gives the number of layers, such as tapered(8, layers=12), is also accepted for integers.

    Raises:
        UserError: as parse_heads; the message does not name the field.
    """
    if "(" in text and number is int:
        return parse_allocation(text, multiple=1).widths()
    schedule: list[Number | None] = []
    stripped = text.strip()
    terms = stripped[1:-1] if stripped[:1] + stripped[-1:] == "[]" else text
    for term in terms.split(","):
        found = _TERMS[number].fullmatch(term)
        if not found:
            raise _wrong_term(term.strip(), number)
        layers = int(found[2] or 1)
        if len(schedule) + layers > MOST_LAYERS:
            raise UserError(f"more than {MOST_LAYERS:,} layers; give at most that")
        schedule += [None if found[1] == "null" else number(found[1])] * layers
    return tuple(schedule)


def _wrong_term(term: str, number: type[int] | type[float]) -> UserError:
    kind, example = ("whole numbers", "3x2,6x2,8x2,12x6") if number is int else ("numbers", "0.5,1,0.25x2")
    return UserError(f"give n or nxN with {kind}, for example {example}; {quote(term)} is neither")


def normalize_heads(value: Any, field: str = "heads") -> Any:
    """A head schedule, given as text or as a list of head counts, in its shortest text: ``"2,4,8x2"``. What
    is neither stays as it is, and so does an allocation that does not give the number of layers."""
    if type(value) is int:
        value = str(value)
    elif isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    with naming(field, value):
        if "(" in value and (allocation := parse_allocation(value, multiple=1)).layers is None:
            return allocation.text
    return format_heads(parse_heads(value, field=field))


def format_heads(heads: Iterable[float | None]) -> str:
    """Write a schedule run-length encoded (a run of one is bare): ``parse_heads(format_heads(s)) == s``.
    Other schedules are written alike, with ``null`` for None."""
    texts = [
        "null" if count is None else f"{count:.6g}" if type(count) is float else str(count) for count in heads
    ]
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return ",".join(f"{text}x{length}" if length > 1 else text for text, length in runs)


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
