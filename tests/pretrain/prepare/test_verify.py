"""``python -m pretrain.prepare verify``: damage of every kind is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.token_counts import COUNTS_FILE, stored_counts, write_counts
from pretrain.prepare.verify import verify
from pretrain.utils.files import file_entry
from tests.helpers.corpora import write_documents


def hash_again(path: Path) -> None:
    """Write the hash of a damaged file over that of the sound one."""
    meta = json.loads((path.parent / "meta.json").read_text())
    meta["files"][path.name] = file_entry(path)
    (path.parent / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def copied(small_folder, tmp_path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "copied"))


def test_a_sound_corpus_is_verified(small, copied):
    lines = list(verify(Corpus.open(copied)))
    assert lines[0] == "hashes      5 files are what was written"
    assert lines[2] == "counts      those stored are those of the training tokens"
    assert f"{small.training.num_documents} of {small.training.num_documents} documents end" in lines[1]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["training.bin", "validation.bin"])
def test_a_changed_bit_is_found(copied, name):
    flip(copied / name, 1000)
    with pytest.raises(UserError, match=rf"verify: .*{name}' is not what was written \(its hash differs"):
        list(verify(Corpus.open(copied)))


@pytest.mark.parametrize("damage", ["boundaries", "end"])
def test_damage_that_was_hashed_is_found(copied, damage):
    """A folder whose hashes were written over damage: other checks are left."""
    corpus = Corpus.open(copied)
    if damage == "boundaries":
        path = copied / "training.idx"
        data = bytearray(path.read_bytes())
        start = 34 + 12 * corpus.training.num_documents + 8 * 3
        data[start : start + 8] = (7).to_bytes(8, "little")
        message = r"training\.idx' is damaged: its documents are not in order"
    else:
        path = copied / "training.bin"
        data = bytearray(path.read_bytes())
        data[-2:] = b"\x05\x00"
        message = "1 training documents of .* do not end with"
    path.write_bytes(bytes(data))
    hash_again(path)
    with pytest.raises(UserError, match=message):
        list(verify(Corpus.open(copied)))


def test_tokens_are_counted_again(copied):
    counts = np.array(stored_counts(Corpus.open(copied)))
    first, second = np.flatnonzero(counts)[:2]
    counts[first], counts[second] = counts[first] - 1, counts[second] + 1
    hash_again(write_counts(copied, counts))
    with pytest.raises(UserError, match=f"verify: .*{COUNTS_FILE}' does not hold the counts of the training"):
        list(verify(Corpus.open(copied)))


def test_a_bare_pair_has_no_hashes_and_its_tokens_are_checked(small, tmp_path):
    for name, third in (("sound", 5), ("beyond", 60_000)):
        write_documents(tmp_path / name, [[1, 2], [third], [3]])
    lines = list(verify(Corpus.open(tmp_path / "sound", small.tokenizer)))
    assert "none recorded" in lines[0] and lines[2].startswith("counts      none stored")
    message = r"has token 60000, which its tokenizer does not have; valid: 0\.\.599"
    with pytest.raises(UserError, match=message):
        list(verify(Corpus.open(tmp_path / "beyond", small.tokenizer)))
