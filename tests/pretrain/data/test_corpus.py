"""Opened corpora: damaged folders are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus


@pytest.fixture
def damaged(small_folder, tmp_path):
    """A copy of the small corpus to break."""
    return Path(shutil.copytree(small_folder, tmp_path / "damaged"))


def swap_splits(folder: Path) -> None:
    for suffix in ("bin", "idx"):
        (folder / f"training.{suffix}").rename(folder / "saved")
        (folder / f"validation.{suffix}").rename(folder / f"training.{suffix}")
        (folder / "saved").rename(folder / f"validation.{suffix}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta.json", None, r"has no meta\.json"),
        ("meta.json", b"{", "is damaged"),
        ("meta.json", b"[]", "is damaged"),
        ("meta.json", b"[" * 10**5, "is damaged"),
        ("tokenizer/tokenizer.model", b"x", "not a SentencePiece model"),
        ("training.bin", b"xx", r"training\.bin' is truncated"),
        ("validation.idx", None, r"validation\.idx' is missing"),
    ],
)
def test_damaged_files_are_refused_in_one_line(damaged, name, content, message):
    (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
    refused(damaged, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"tokens": -1}}, "training.tokens: -1"),
        ({"training": None}, "is damaged"),
        ({"tokenizer": {"hash": "../x"}}, "tokenizer.hash: "),
        ({"tokenizer": {"hash": "0" * 64}}, "not the one the corpus"),
        ({"format_version": 9}, r"format_version: 9 is not valid; give one of 1\); prepare the corpus again"),
    ],
)
def test_impossible_entries_are_refused_in_one_line(damaged, change, message):
    meta = json.loads((damaged / "meta.json").read_text())
    for name, value in change.items():
        meta[name] = meta[name] | value if isinstance(value, dict) else value
    (damaged / "meta.json").write_text(json.dumps(meta))
    refused(damaged, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "has no tokenizer folder"),
        (swap_splits, "the files are of different corpora"),
    ],
)
def test_folders_of_other_files_are_refused_in_one_line(damaged, damage, message):
    damage(damaged)
    refused(damaged, message)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        Corpus.open(folder)
    assert "\n" not in str(refusal.value)
