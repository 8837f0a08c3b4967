"""How ZeRO cuts parameters into the flat tensors of its ranks: one description for reading and for loading.

Stages 1 and 2 lay a group's parameters end to end in one flat tensor and give every rank an equal part of it,
so that a parameter may lie on several ranks. Stage 3 cuts every parameter into one slice per rank and lays a
rank's slices of a sub-group (parameters of one group, about sub_group_size elements) end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Named = Sequence[tuple[str, int]]
"""Parameters in order: name, and number of elements on one tensor-parallel rank."""


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements inside one data-parallel rank's flat tensor."""

    flat: int
    """Index of the flat tensor: the group (stages 1 and 2) or the sub-group (stage 3)."""
    rank: int
    """Data-parallel rank that holds it."""
    offset: int
    """Its first element in that rank's flat tensor."""
    start: int
    """Its first element in the flattened parameter."""
    numel: int
    """Number of elements, padding not included."""


def contiguous_pieces(
    flat: int, parameters: Named, paddings: Sequence[int] | None, partition: int
) -> dict[str, list[Piece]]:
    """Pieces of a group in stages 1 and 2, by parameter, in the order of their elements.

    Args:
        flat: index of the group.
        parameters: the group's parameters in the order of the flat tensor.
        paddings: unused elements after each parameter; None for none.
        partition: elements of the flat tensor that each rank holds.
    """
    pieces: dict[str, list[Piece]] = {}
    begin = 0
    for index, (name, numel) in enumerate(parameters):
        found = pieces[name] = []
        position = begin
        while position < begin + numel:
            rank, offset = divmod(position, partition)
            length = min(begin + numel - position, partition - offset)
            found.append(Piece(flat, rank, offset, position - begin, length))
            position += length
        begin += numel + (paddings[index] if paddings else 0)
    return pieces


def sliced_pieces(flat: int, parameters: Named, ranks: int) -> dict[str, list[Piece]]:
    """Pieces of a sub-group in stage 3, by parameter, in the order of their elements.

    Every slice is as long as the first; the last ones are padded.
    """
    pieces: dict[str, list[Piece]] = {}
    offset = 0
    for name, numel in parameters:
        length = slice_length(numel, ranks)
        starts = range(0, numel, length)
        pieces[name] = [
            Piece(flat, rank, offset, start, min(length, numel - start)) for rank, start in enumerate(starts)
        ]
        offset += length
    return pieces


def slice_length(numel: int, ranks: int) -> int:
    """Elements of a parameter on each rank in stage 3, padding included."""
    return -(-numel // ranks)
