"""Chooses the documents that are held out for validation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from model.errors import UserError

VALIDATION_FRACTION = 0.05
"""Of documents, held out unless another share is asked for."""


def digest_to_number(digest: bytes) -> int:
    """What decides the side of a document: the first 8 bytes of its digest, big-endian."""
    return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Split:
    """Which documents are held out: those whose digest, read as a number in [0, 1), is below a threshold.

    The digest is of the text alone, so that copies of one document fall on the same side, and a document
    keeps its side when others are added.
    """

    threshold: int
    """A document is held out when its number (see digest_to_number) is below this."""

    def is_validation(self, digest: bytes) -> bool:
        """True if the document with this digest belongs to the validation split."""
        return digest_to_number(digest) < self.threshold

    def held_out(self, numbers: np.ndarray) -> np.ndarray:
        """``is_validation`` for documents of these numbers, uint64 [n]: bool [n]."""
        return numbers < np.uint64(self.threshold)

    @classmethod
    def choose(cls, numbers: Iterable[int], fraction: float) -> Split:
        """The split with *fraction* held out, moved where needed so that neither side is empty.

        Args:
            numbers: of all documents, or only the smallest and the largest.

        Raises:
            UserError: too few different documents.
        """
        lowest, highest = 2**64, -1
        for number in numbers:
            lowest, highest = min(lowest, number), max(highest, number)
        if lowest >= highest:
            raise UserError(
                "corpus: give at least two different documents, since one is held out for validation; for "
                "text, --format lines makes documents of lines, and --validation_text FILE holds out none"
            )
        return cls(min(max(int(fraction * 2**64), lowest + 1), highest))
