"""Chooses the documents that are held out for validation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from model.errors import UserError

_CHUNK = 1 << 16  # digests processed together


@dataclass(frozen=True)
class Split:
    """Which documents are held out: those whose digest, read as a number in [0, 1), is below a threshold.

    The digest is of the text alone, so that copies of one document fall on the same side, and a document
    keeps its side when others are added.
    """

    threshold: int
    """A document is held out when the first 8 bytes of its digest, big-endian, are below this."""

    def is_validation(self, digest: bytes) -> bool:
        """True if the document with this digest belongs to the validation split."""
        return int.from_bytes(digest[:8], "big") < self.threshold

    def held_out(self, numbers: np.ndarray) -> np.ndarray:
        """``is_validation`` for many documents, bool [n]; *numbers*: first 8 bytes of their digests, uint64
        [n]."""
        return numbers < np.uint64(self.threshold)

    @classmethod
    def choose(cls, chunks: Iterable[np.ndarray], fraction: float, documents: int | None = None) -> Split:
        """The split with *fraction* held out, moved where needed so that neither side is empty.

        Args:
            chunks: first 8 bytes of the documents' digests as big-endian numbers, uint64 [n] each.
            documents: if given, this many different documents are held out, those with the smallest numbers.

        Raises:
            UserError: too few different documents.
        """
        count, lowest, highest = 0, 2**64, -1
        smallest = np.empty(0, np.uint64)  # the documents + 1 smallest different ones so far
        for chunk in chunks:
            if not chunk.size:
                continue
            count += chunk.size
            lowest, highest = min(lowest, int(chunk.min())), max(highest, int(chunk.max()))
            if documents is not None:
                smallest = np.unique(np.concatenate([smallest, chunk]))[: documents + 1]
        if lowest >= highest:
            raise UserError(
                f"corpus: {count} documents, none different from another; "
                "needed: at least two different documents, one of them for validation"
            )
        if documents is None:
            return cls(min(max(int(fraction * 2**64), lowest + 1), highest))
        if smallest.size <= documents:
            raise UserError(
                f"validation_documents: {documents} of only {smallest.size} different documents; "
                f"valid: at most {smallest.size - 1}"
            )
        return cls(int(smallest[documents]))


def in_chunks(digests: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Yield the first 8 bytes of each digest as big-endian numbers, in uint64 arrays for ``Split.choose``."""
    numbers = (int.from_bytes(digest[:8], "big") for digest in digests)
    while chunk := list(itertools.islice(numbers, _CHUNK)):
        yield np.array(chunk, np.uint64)
