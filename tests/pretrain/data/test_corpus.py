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


def edit_meta(folder: Path, change) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


def swap_splits(folder: Path) -> None:
    for suffix in ("bin", "idx"):
        (folder / f"training.{suffix}").rename(folder / "saved")
        (folder / f"validation.{suffix}").rename(folder / f"training.{suffix}")
        (folder / "saved").rename(folder / f"validation.{suffix}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda folder: (folder / "meta.json").unlink(), r"has no meta\.json"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "is damaged"),
        (lambda folder: (folder / "meta.json").write_text("[" * 10**5), "is damaged"),
        (
            lambda folder: edit_meta(folder, lambda meta: meta["training"].update(tokens=-1)),
            "training.tokens: -1",
        ),
        (
            lambda folder: edit_meta(folder, lambda meta: meta["tokenizer"].update(hash="../x")),
            "tokenizer.hash: ",
        ),
        (lambda folder: edit_meta(folder, lambda meta: meta.pop("training")), "is damaged"),
        (
            lambda folder: edit_meta(folder, lambda meta: meta.update(format_version=9)),
            r"format_version: 9 is not valid; give one of 1\); prepare the corpus again",
        ),
        (
            lambda folder: edit_meta(folder, lambda meta: meta["tokenizer"].update(hash="0" * 64)),
            "not the one the corpus",
        ),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "has no tokenizer folder"),
        (
            lambda folder: (folder / "tokenizer/tokenizer.model").write_bytes(b"x"),
            "not a SentencePiece model",
        ),
        (lambda folder: (folder / "training.bin").write_bytes(b"xx"), r"training\.bin' is truncated"),
        (lambda folder: (folder / "validation.idx").unlink(), r"validation\.idx' is missing"),
        (swap_splits, "the files are of different corpora"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(damaged, damage, message):
    damage(damaged)
    with pytest.raises(UserError, match=message) as refusal:
        Corpus.open(damaged)
    assert "\n" not in str(refusal.value)
