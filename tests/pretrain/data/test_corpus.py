"""Opened corpora: damaged folders are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.prepare.inspection import verify


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
        *(
            (name, os.mkfifo, "is a pipe, not a file")
            for name in ("meta.json", "training.bin", "training.idx")
        ),
    ],
)
def test_damaged_files_are_refused_in_one_line(damaged, name, content, message):
    (damaged / name).unlink()
    if callable(content):
        content(damaged / name)
    elif content is not None:
        (damaged / name).write_bytes(content)
    refused(damaged, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"tokens": -1}}, "training.tokens: -1"),
        ({"training": None}, "is damaged"),
        ({"tokenizer": {"hash": "../x"}}, "tokenizer.hash: "),
        ({"tokenizer": {"hash": "0" * 64}}, "says that tokenizer.hash is 0000"),
        ({"format_version": 9}, r"format_version: 9 is not valid; give one of 1\); prepare the corpus again"),
    ],
)
def test_impossible_entries_are_refused_in_one_line(damaged, change, message):
    meta = json.loads((damaged / "meta.json").read_text())
    for name, value in change.items():
        meta[name] = meta[name] | value if isinstance(value, dict) else value
    (damaged / "meta.json").write_text(json.dumps(meta))
    refused(damaged, message)


# What follows from nothing else: the text is not there any more.
FREE = ("/content_hash", "/tokenizer/name", "/training/bytes", "/validation/bytes")


def leaves(value, key=""):
    """The names of all entries that are not mappings."""
    if not isinstance(value, dict):
        return [key]
    return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{key}/{name}")]


def changed(value, key, new):
    first, _, rest = key.lstrip("/").partition("/")
    return value | {first: changed(value[first], rest, new) if rest else new}


def test_every_entry_that_says_something_of_the_files_is_checked(damaged):
    """A number that is another one, and values of other kinds, by opening, the rest by verify."""
    written = json.loads((damaged / "meta.json").read_text())
    keys = [
        key for key in leaves(written) if key.split("/")[1] not in ("source", "split", "request", "skipped")
    ]
    assert len(keys) > 25
    for key in keys:
        value, name = _value(written, key), key.split("/")[-1]
        other = "0" * len(value) if isinstance(value, str) else value + 1
        for new in (other, None, "x", [], {}, True, -1, 1e300, {"a": [1]}):
            (damaged / "meta.json").write_text(json.dumps(changed(written, key, new)))
            if new == value or (key in FREE and (new is None or type(new) is type(value))):
                continue
            with pytest.raises(UserError) as refusal:
                list(verify(Corpus.open(damaged)))
            assert any(word in str(refusal.value) for word in (name, "hash", key.split("/")[1])), (key, new)
            assert "\n" not in str(refusal.value)


def _value(meta, key):
    for name in key.split("/")[1:]:
        meta = meta[name]
    return meta


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
