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


# What follows from nothing else: the text is not there any more.
FREE = (("content_hash",), ("tokenizer", "name"), ("training", "bytes"), ("validation", "bytes"))
ANYTHING = ("source", "split", "request", "skipped")


def leaves(value, path=()):
    """All entries that are not mappings, and where they are."""
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]


def changed(value, path, new):
    return value | {path[0]: changed(value[path[0]], path[1:], new)} if path else new


def test_every_entry_that_says_something_of_the_files_is_checked(damaged):
    """A number that is another one, and values of other kinds, by opening, the rest by verify."""
    written = json.loads((damaged / "meta.json").read_text())
    entries = [(path, value) for path, value in leaves(written) if path[0] not in ANYTHING]
    assert len(entries) > 25
    for path, value in entries:
        other = "0" * len(value) if isinstance(value, str) else value + 1
        for new in (other, None, "x", [], {}, True, -1, 1e300, {"a": [1]}):
            (damaged / "meta.json").write_text(json.dumps(changed(written, path, new)))
            if new == value or (path in FREE and (new is None or type(new) is type(value))):
                continue
            with pytest.raises(UserError) as refusal:
                list(verify(Corpus.open(damaged)))
            assert any(word in str(refusal.value) for word in ("hash", path[0], path[-1])), (path, new)
            assert "\n" not in str(refusal.value)


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
