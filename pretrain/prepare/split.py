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

    fraction: float
    """Requested fraction of documents in the validation split (0 if a number was requested)."""
    threshold: int
    """A document is held out when the first 8 bytes of its digest, big-endian, are below this."""

    def is_validation(self, digest: bytes) -> bool:
        """True if the document with this digest belongs to the validation split."""
        return int.from_bytes(digest[:8], "big") < self.threshold

    def held_out(self, numbers: np.ndarray) -> np.ndarray:
        """``is_validation`` for many documents, bool [n]; *numbers*: first 8 bytes of their digests, uint64 [n]."""
        return numbers < np.uint64(self.threshold)

    @classmethod
    def choose(cls, digests: Iterable[bytes], fraction: float) -> Split:
        """The split with *fraction* held out, moved where needed so that neither side is empty.

        Raises UserError for a fraction outside (0, 1) and for fewer than two different documents.
        """
        numbers = (int.from_bytes(digest[:8], "big") for digest in digests)
        return cls.choose_from(in_chunks(numbers), fraction, None)

    @classmethod
    def choose_from(cls, chunks: Iterable[np.ndarray], fraction: float, documents: int | None) -> Split:
        """The split with *fraction* held out or, if *documents* is given, that many different documents.

        Args:
            chunks: first 8 bytes of the documents' digests as big-endian numbers, uint64 [n] each.

        Raises:
            UserError: out of range, or too few different documents.
        """
        if documents is None and not 0 < fraction < 1:
            raise UserError(f"validation_fraction: {fraction} is out of range; valid: between 0 and 1")
        if documents is not None and documents < 1:
            raise UserError(f"validation_documents: {documents} is out of range; valid: 1 or more")
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
            return cls(fraction, min(max(int(fraction * 2**64), lowest + 1), highest))
        if smallest.size <= documents:
            raise UserError(
                f"validation_documents: {documents} of only {smallest.size} different documents; "
                f"valid: at most {smallest.size - 1}"
            )
        return cls(0.0, int(smallest[documents]))


def in_chunks(numbers: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield the numbers, each the first 8 bytes of a digest, as uint64 arrays for ``Split.choose_from``."""
    remaining = iter(numbers)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield np.array(chunk, np.uint64)
