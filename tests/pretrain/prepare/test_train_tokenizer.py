"""The sample that a tokenizer learns from: chosen in one pass, as two passes would choose it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.corpus import Corpus
from pretrain.prepare import train_tokenizer as module
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles
from pretrain.prepare.sources.text_source import Document
from pretrain.prepare.split import Split
from pretrain.prepare.train_tokenizer import Sample, most_bytes_read
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_source


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=60), st.integers(1, 5000), st.integers(0, 9))
def test_one_pass_finds_what_two_would(lengths, most_bytes, tenths):
    documents = [Document("", f"{number} " + "\u00e4" * length) for number, length in enumerate(lengths)]
    split = Split(tenths * 2**64 // 10)
    sample = Sample(most_bytes)
    for document in documents:
        sample.add(document)
    total = sum(len(document.text.encode()) for document in documents)
    assert (sample.documents, sample.bytes) == (len(documents), total)
    share = min(1.0, most_bytes / max(total, 1))
    assert list(sample.texts(split)) == [
        document.text
        for document in documents
        if not split.is_validation(document.digest())
        and int.from_bytes(document.digest()[8:16], "big") < int(share * 2**64)
    ]


def test_the_sample_stays_small_while_text_comes_in():
    sample = Sample(20_000)
    held = []
    for number in range(5000):
        sample.add(Document("", f"{number:08d}" * 10))
        held.append(sum(size for _, size, _ in sample._kept))
    assert max(held) <= 1.3 * 20_000 and held[-1] > 0.7 * 20_000


class Counted(PlainFiles):
    """Counts the documents that are read for the tokenizer."""

    documents_read = 0

    def documents(self) -> Iterator[Document]:
        for document in super().documents():
            self.documents_read += 1
            yield document


@pytest.mark.parametrize("max_tokens", [None, 20_000])
def test_the_source_is_read_once_and_no_further_than_a_cap_needs(tmp_path, monkeypatch, max_tokens):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 30_000)
    monkeypatch.setattr(module, "_FEWEST_DOCUMENTS", 2)
    source = Counted("text", small_source().files)
    there = len(list(small_source().documents()))
    reports: list[str] = []
    selection = Selection(max_tokens=max_tokens)
    out = make_corpus(source, tmp_path / "out", SMALL_VOCABULARY, selection, reports.append)
    assert Corpus.open(out).tokenizer.vocab_size == SMALL_VOCABULARY
    if max_tokens is None:
        assert source.documents_read == there, "in one pass"
    else:
        assert 2 < source.documents_read < there / 2
        assert any("entries on 0.2 MB" in report for report in reports), reports
        read = itertools.islice(small_source().documents(), source.documents_read)
        assert sum(len(document.text.encode()) for document in read) >= 8 * max_tokens


def test_what_a_cap_lets_read():
    assert most_bytes_read(None) is None
    assert most_bytes_read(1000) == 200_000_000, "a sample's worth, however few tokens are kept"
    assert most_bytes_read(10**9) == 8 * 10**9
