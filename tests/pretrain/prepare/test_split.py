"""Which documents are held out."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.prepare.assemble import Selection
from pretrain.prepare.split import Split, digest_to_number


def digests(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def chosen(documents: list[bytes], fraction: float) -> Split:
    return Split.choose(map(digest_to_number, documents), fraction)


@given(st.integers(2, 40), st.floats(0.001, 0.999))
def test_neither_side_of_a_split_is_empty(count, fraction):
    split = chosen(digests(count), fraction)
    assert 0 < sum(split.is_validation(digest) for digest in digests(count)) < count


def test_split_has_the_asked_fraction_and_is_stable_when_documents_are_added():
    documents = digests(10_000)
    split = chosen(documents, 0.05)
    held_out = [split.is_validation(digest) for digest in documents]
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
    with pytest.raises(UserError, match=r"^max_tokens: "):
        Selection(max_tokens=number)
