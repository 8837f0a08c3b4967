"""Stored token counts: those of the training tokens, used where they are sound, and counted where they are not."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from model.errors import UserError
from pretrain.data import token_counts
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.sources.files import TextFiles
from pretrain.data.token_counts import COUNTS_FILE, stored_counts, token_shares
from pretrain.prepare.pipeline import prepare
from pretrain.prepare.verify import verify
from pretrain.run.data import RunData
from pretrain.utils.files import file_entry
from pretrain.validation.baselines import compare_baselines
from tests.helpers.small_corpus import small_paths


def by_hand(corpus: Corpus) -> list[int]:
    documents = [corpus.training.document(index).tolist() for index in range(corpus.training.num_documents)]
    counter = Counter(token for document in documents for token in document)
    return [counter[token] for token in range(corpus.tokenizer.vocab_size)]


@pytest.fixture
def copied(small_folder, tmp_path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "copied"))


def replace_counts(folder: Path, counts: np.ndarray) -> None:
    """Write other counts, and their hash over that of the old ones."""
    path = token_counts.write_counts(folder, counts)
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"][COUNTS_FILE] = file_entry(path)
    (folder / "meta.json").write_text(json.dumps(meta))


def test_a_preparation_counts_what_it_trains_on(small, tmp_path, monkeypatch):
    """Of documents that are held out, dropped as copies or beyond the cap, none is counted; in chunks of any size."""
    assert stored_counts(small).tolist() == by_hand(small)
    monkeypatch.setattr("pretrain.prepare.output._COUNT_CHUNK", 1000)
    folder = prepare(
        TextFiles([*small_paths(), small_paths()[0]]), tmp_path / "out", tokenizer=small.tokenizer,
        validation_fraction=0.3, drop_duplicates=True, max_tokens=60_000, part_bytes=20_000,
    )  # fmt: skip
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


@pytest.mark.parametrize("damage", ["none recorded", "missing", "truncated", "other vocabulary", "other sum"])
def test_without_sound_counts_the_tokens_are_counted(copied, damage):
    corpus = Corpus.open(copied)
    expected, path = token_shares(corpus).shares, copied / COUNTS_FILE
    if damage == "none recorded":
        del corpus.meta["files"][COUNTS_FILE]
    elif damage == "missing":
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


def test_verify_counts_again(copied):
    counts = np.array(stored_counts(Corpus.open(copied)))
    first, second = np.flatnonzero(counts)[:2]
    counts[first], counts[second] = counts[first] - 1, counts[second] + 1
    replace_counts(copied, counts)
    with pytest.raises(UserError, match=f"verify: .*{COUNTS_FILE}' does not hold the counts of the training"):
        list(verify(Corpus.open(copied)))
    meta = json.loads((copied / "meta.json").read_text())
    del meta["files"][COUNTS_FILE]  # as in a corpus from before there were counts
    (copied / "meta.json").write_text(json.dumps(meta))
    assert list(verify(Corpus.open(copied)))[2].startswith("counts      none stored")
