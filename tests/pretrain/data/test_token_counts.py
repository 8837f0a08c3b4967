"""Stored token counts: those of the training tokens, used where they are sound, and counted where they are
not."""

from __future__ import annotations

import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from pretrain.data import token_counts
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.making.assemble import Selection
from pretrain.data.making.make import make_corpus
from pretrain.data.sources.files import PlainFiles
from pretrain.data.token_counts import COUNTS_FILE, stored_counts, token_shares
from pretrain.run.data import RunData
from pretrain.validation.baselines import compare_baselines
from tests.helpers.small_corpus import small_source


def by_hand(corpus: Corpus) -> list[int]:
    documents = [corpus.training.document(index).tolist() for index in range(corpus.training.num_documents)]
    counter = Counter(token for document in documents for token in document)
    return [counter[token] for token in range(corpus.tokenizer.vocab_size)]


@pytest.fixture
def copied(small_folder, tmp_path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "copied"))


def test_a_preparation_counts_what_it_trains_on(small, tmp_path, monkeypatch):
    """Of documents that are held out, dropped as copies or beyond the cap, none is counted; in chunks of any
    size."""
    assert stored_counts(small).tolist() == by_hand(small)
    monkeypatch.setattr("pretrain.data.making.assemble._COUNT_CHUNK", 1000)
    files = small_source().files
    source = PlainFiles("text", [*files, files[0]], unit_bytes=20_000)
    selection = Selection(0.3, drop_duplicates=True, max_tokens=60_000)
    folder = make_corpus(source, tmp_path / "out", small.tokenizer, selection)
    corpus = Corpus.open(folder)
    assert stored_counts(corpus).tolist() == by_hand(corpus)
    assert corpus.training.num_tokens < small.training.num_tokens


def test_they_are_used_and_change_no_number(copied, monkeypatch):
    corpus = Corpus.open(copied)
    counted = corpus.training.counts(corpus.tokenizer.vocab_size) + 1
    monkeypatch.setattr(IndexedTokens, "counts", lambda *_, **__: pytest.fail("counted although stored"))
    found = token_shares(corpus, most=10)
    assert np.array_equal(found.shares, counted / counted.sum())
    assert found.counted == found.total == corpus.training.num_tokens


@pytest.mark.parametrize("damage", ["missing", "truncated", "other vocabulary", "other sum"])
def test_without_sound_counts_the_tokens_are_counted(copied, damage):
    corpus = Corpus.open(copied)
    expected, path = token_shares(corpus).shares, copied / COUNTS_FILE
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        counts = stored_counts(corpus)
        token_counts.write_counts(copied, counts[:-1] if damage == "other vocabulary" else counts + 1)
    assert stored_counts(corpus) is None
    assert np.array_equal(token_shares(corpus).shares, expected)


def test_a_sample_is_said_to_be_one(copied, monkeypatch):
    (copied / COUNTS_FILE).unlink()
    corpus = Corpus.open(copied)
    counts = IndexedTokens.counts
    monkeypatch.setattr(
        IndexedTokens, "counts", lambda *arguments, **rest: counts(*arguments, chunk=1000, **rest)
    )
    monkeypatch.setattr(token_counts, "PROGRESS_SECONDS", 0.0)
    lines: list[str] = []
    sampled = token_shares(corpus, corpus.training.num_tokens // 3, lines.append)
    assert 0.2 * sampled.total < sampled.counted < 0.4 * sampled.total
    assert lines[0].startswith("counting copied: 1,000 tokens (") and lines[0].endswith("no stored counts")
    assert "(100%)" in lines[-1] and f"{sampled.counted:,} tokens" in lines[-1]
    whole = compare_baselines(RunData([(corpus, Fraction(1))]), 32, 5)
    assert str(whole).endswith(f"zlib -9 {whole.zlib:.4f}")
    monkeypatch.setattr(token_shares, "__defaults__", (1000, None))
    part = compare_baselines(RunData([(corpus, Fraction(1))]), 32, 5)
    assert str(part).endswith(
        f"(frequencies of 1,000 of {corpus.training.num_tokens:,} training tokens, evenly spread)"
    )
