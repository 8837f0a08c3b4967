"""Which documents are held out."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.making.assemble import Selection
from pretrain.data.making.split import Split, in_chunks


def digests(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def chosen(documents: list[bytes], fraction: float) -> Split:
    return Split.choose(in_chunks(documents), fraction)


@given(st.integers(2, 40), st.floats(0.001, 0.999))
def test_neither_side_of_a_split_is_empty(count, fraction):
    split = chosen(digests(count), fraction)
    assert 0 < sum(split.is_validation(digest) for digest in digests(count)) < count


def test_split_has_the_asked_fraction_and_is_stable_when_documents_are_added():
    documents = digests(10_000)
    held_out = [chosen(documents, 0.05).is_validation(digest) for digest in documents]
    assert sum(held_out) == pytest.approx(500, abs=100)  # 4 standard deviations of 22
    fewer = chosen(documents[:5000], 0.05)
    assert [fewer.is_validation(digest) for digest in documents] == held_out


@pytest.mark.parametrize("count", [0, 1])
def test_one_document_cannot_be_split(count):
    with pytest.raises(UserError, match="at least two different documents"):
        chosen(digests(1) * 2 * count, 0.5)


@given(
    st.floats().filter(lambda fraction: not 0 < fraction < 1) | st.text() | st.booleans(),
    st.integers(max_value=0) | st.floats() | st.text(),
)
def test_selections_out_of_range_are_refused(fraction, number):
    with pytest.raises(UserError, match=r"^validation_fraction: "):
        Selection(validation_fraction=fraction)
    for name in ("validation_documents", "max_tokens"):
        with pytest.raises(UserError, match=f"^{name}: "):
            Selection(**{name: number})


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60), st.integers(1, 20), st.integers(1, 9))
def test_a_number_of_documents_held_out_is_exact_and_of_the_smallest_hashes(numbers, documents, chunk):
    chunks = [np.array(numbers[start : start + chunk], np.uint64) for start in range(0, len(numbers), chunk)]
    different = sorted(set(numbers))
    if len(different) <= documents:
        with pytest.raises(UserError, match="different"):
            Split.choose(chunks, 0.5, documents)
        return
    split = Split.choose(chunks, 0.5, documents)
    held_out = {number for part in chunks for number in part[split.held_out(part)].tolist()}
    assert sorted(held_out) == different[:documents]
    assert all(split.is_validation(number.to_bytes(8, "big")) for number in held_out)
