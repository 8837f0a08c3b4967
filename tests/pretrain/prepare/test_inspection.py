"""``head-schedules prepare verify``: damage of every kind is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.prepare.inspection import verify
from tests.helpers.corpora import write_documents


def test_a_sound_corpus_is_verified(small):
    lines = list(verify(small))
    assert lines[0] == "hashes      4 files are what was written"
    assert f"{small.training.num_tokens:,} tokens of {small.training.num_documents} documents are" in lines[1]


@pytest.mark.parametrize("name", ["training.bin", "validation.bin"])
def test_a_changed_bit_is_found(small_folder, tmp_path, name):
    path = Path(shutil.copytree(small_folder, tmp_path / "copied")) / name
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=rf"verify: .*{name}' is not what was written \(its hash differs"):
        list(verify(Corpus.open(path.parent)))


def test_a_bare_pair_has_no_hashes_and_its_tokens_are_checked(small, tmp_path):
    for name, third in (("sound", 5), ("beyond", 60_000)):
        write_documents(tmp_path / name, [[1, 2], [third], [3]])
    assert "none recorded" in next(verify(Corpus.open(tmp_path / "sound", small.tokenizer)))
    message = r"has token 60000, which its tokenizer does not have; valid: 0\.\.599"
    with pytest.raises(UserError, match=message):
        list(verify(Corpus.open(tmp_path / "beyond", small.tokenizer)))
