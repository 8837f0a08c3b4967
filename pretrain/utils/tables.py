"""Tables as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

NOTHING = "—"
"""A cell without a value."""


def interval_text(value: float, low: float, high: float, form: str = "+.4f") -> str:
    """A value with the ends of its interval: +0.0310 [+0.0080, +0.0540]."""
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Lines with the cells of a table in columns, two spaces apart, without spaces at their ends.

    Args:
        rows: cells, the same number in every row; the first row may be a header.
        left: columns that are aligned on the left; all others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
