"""Pairs whose header or index was corrupted: refused when they are opened, or read without any
other error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import CODE_OF_DTYPE, IndexedTokens
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer
from tests.helpers.corpora import write_pair
from tests.helpers.fuzzing import fixed, seeded


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 3, 2, 4], "not in order"),
        ([0, -(2**63), 2**63 - 1, 4], "not in order"),
        ([0, 1, 2, 3], "do not cover its sequences"),
        ([1, 1, 2, 4], "do not cover its sequences"),
        ([], "do not cover its sequences"),
    ],
)
def test_boundaries_are_checked_when_a_pair_is_opened(tmp_path, boundaries, message):
    index = write_pair(tmp_path / "c", [[3], [3], [3, 3]])
    index[26:34] = len(boundaries).to_bytes(8, "little")
    (tmp_path / "c.idx").write_bytes(index[: -8 * 4] + np.array(boundaries, "<i8").tobytes())
    with pytest.raises(UserError, match=rf"c\.idx' is damaged: .*{message}; copy both files again"):
        IndexedTokens(tmp_path / "c")


def test_a_large_index_is_checked_across_its_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.data.indexed._CHECK_CHUNK", 2)
    index = write_pair(tmp_path / "c", [[1]] * 7)
    IndexedTokens(tmp_path / "c")
    for place in range(1, 7):
        start = len(index) - 8 * (8 - place)
        damaged = index[:start] + (place + 2).to_bytes(8, "little") + index[start + 8 :]
        (tmp_path / "c.idx").write_bytes(damaged)
        with pytest.raises(UserError, match="not in order"):
            IndexedTokens(tmp_path / "c")


_DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8)
_NUMBERS = st.one_of(
    st.integers(-2, 12),
    st.sampled_from([2**15, 2**31 - 1, -(2**31), 2**32, 2**60, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]),
)


@st.composite
def damage(draw: st.DrawFn) -> tuple[list[list[int]], Any, Any]:
    """(documents, dtype, what makes the damaged index of the undamaged one)."""
    documents, dtype = draw(_DOCUMENTS), draw(st.sampled_from(sorted(CODE_OF_DTYPE, key=str)))
    sequences = sum(map(len, documents))
    edges = {"lengths": 34, "offsets": 34 + 4 * sequences, "boundaries": 34 + 12 * sequences}
    counts = {"lengths": sequences, "offsets": sequences, "boundaries": len(documents) + 1}
    edits: list[tuple[int, bytes]] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["header", "lengths", "offsets", "boundaries", "boundaries", "byte"]))
        if kind == "header":
            place, size = draw(st.sampled_from([(0, 1), (9, 8), (17, 1), (18, 8), (26, 8)]))
        elif kind == "byte":
            place, size = draw(st.integers(0, 34 + 12 * sequences + 8 * len(documents))), 1
        else:
            size = 4 if kind == "lengths" else 8
            place = edges[kind] + size * draw(st.integers(0, max(0, counts[kind] - 1)))
        edits.append((place, (draw(_NUMBERS) % 256**size).to_bytes(size, "little")))
    cut = draw(st.one_of(st.none(), st.none(), st.integers(-20, 20)))

    def apply(index: bytearray) -> bytes:
        for place, value in edits:
            index[place : place + len(value)] = value
        return bytes(index if cut is None else index + bytes(cut) if cut >= 0 else index[:cut])

    return documents, dtype, apply


def only_user_errors(tokenizer: Tokenizer) -> Any:
    """The fuzzed test: whatever was done to an index, opening refuses it or everything that reads
    it works."""

    @given(damage())
    def test(example: tuple[list[list[int]], Any, Any]) -> None:
        documents, dtype, apply = example
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "c"
            index = write_pair(prefix, documents, dtype)
            prefix.with_suffix(".idx").write_bytes(apply(index))
            try:
                tokens = IndexedTokens(prefix)
                corpus = Corpus.open(prefix, tokenizer)
            except UserError as error:
                assert str(prefix) in str(error) and "\n" not in str(error)
                return
            for stream in (tokens, corpus.training, corpus.validation):
                use(stream)
            for context_length in (1, 4):
                try:
                    training = TrainingSequences([(corpus, 1)], context_length, 0)
                    validation = ValidationSequences(corpus, context_length)
                    training.batch(0, 2 * training.windows[0])
                    training.document_offsets(0, training.windows[0])
                    validation.batch(0, len(validation))
                    validation.document_starts()
                except UserError:
                    pass

    return test


def use(stream: IndexedTokens) -> None:
    """Call everything that reads *stream*."""
    documents = [stream.document(number) for number in range(stream.num_documents)]
    assert sum(document.size for document in documents) == stream.num_tokens
    if documents:
        np.testing.assert_array_equal(np.concatenate(documents), stream.read(0, stream.num_tokens))
        assert [stream.start_of(number) for number in range(stream.num_documents)] == np.cumsum(
            [0, *(document.size for document in documents[:-1])]
        ).tolist()
        assert stream.ends_of(0, stream.num_documents).max(initial=0) == stream.num_tokens
    for start in range(stream.num_tokens):
        stream.document_starts(start, stream.num_tokens - start)


def test_a_damaged_index_is_refused_or_reads(small):
    fixed(only_user_errors(small.tokenizer), examples=150)


@pytest.mark.slow
def test_a_damaged_index_is_refused_or_reads_with_another_seed(small):
    seeded(only_user_errors(small.tokenizer), examples=2000)
