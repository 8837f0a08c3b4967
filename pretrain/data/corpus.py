"""Opens a prepared corpus for reading."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.megatron import is_prefix, open_prefix, split_prefix
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash

FORMAT_VERSION = 1
META_FILE = "meta.json"


def labels_file(folder: Path, split: str) -> Path:
    """The file of a labelled corpus with the classes of a split's documents (see pretrain/data/labelled.py)."""
    return folder / f"{split}_labels.npy"


@dataclass(frozen=True)
class Checked:
    """What one rank has checked of a corpus. Others open the same files with it, and do not check them again."""

    meta: dict[str, Any]
    files: list[tuple[str, int, int, int]]
    """Name, inode number, bytes and modification time (ns) of each file: equal on all nodes of a shared file system,
    and different for a copy on another disk."""


@dataclass(frozen=True)
class Corpus:
    """An opened corpus folder."""

    folder: Path
    meta: dict[str, Any]
    """``meta.json``."""
    tokenizer: Tokenizer
    training: IndexedTokens
    validation: IndexedTokens

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        tokenizer: Tokenizer | None = None,
        checked: Checked | None = None,
    ) -> Corpus:
        """Open a folder written by ``prepare``, or the prefix of a ``.bin/.idx`` pair of Megatron's tools.

        Args:
            tokenizer: what a pair was made with (it does not say). A folder has its own, and refuses a different one.
            checked: ``checked()`` of a rank that opened this corpus with the same tokenizer. If the files are the same,
                then the index, the hashes and the tokenizer are not looked at again.

        Raises:
            UserError: *folder* is neither, a file is damaged, or the tokenizer is missing or different.
        """
        root = Path(folder)
        if checked is not None and checked.files == _identities(root):
            return cls._open_again(root, checked.meta, tokenizer)
        if is_prefix(root):
            if tokenizer is None:
                raise UserError(
                    f"data: {str(root)!r} is a .bin/.idx pair, which does not say its tokenizer; give --tokenizer, "
                    "such as --tokenizer gpt2"
                )
            return cls(root, *open_prefix(root, tokenizer))
        if not root.is_dir():
            raise UserError(
                f"data: {str(root)!r} is not a folder; valid: one written by python -m pretrain.prepare"
            )
        try:
            meta = json.loads((root / META_FILE).read_text("utf-8"))
            version, expected_hash = meta["format_version"], meta["tokenizer"]["hash"]
            expected_tokens = {name: meta[name]["tokens"] for name in ("training", "validation")}
        except FileNotFoundError:
            raise UserError(
                f"data: {str(root)!r} has no {META_FILE}; "
                "valid: a folder written by python -m pretrain.prepare"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"data: {str(root / META_FILE)!r} is damaged ({type(error).__name__}: {error}); "
                "prepare the corpus again"
            ) from None
        if version != FORMAT_VERSION:
            raise UserError(
                f"data: {str(root)!r} has format version {version}; valid: {FORMAT_VERSION}; "
                "prepare the corpus again"
            )
        if not (root / "tokenizer").is_dir():
            raise UserError(f"data: {str(root)!r} has no tokenizer folder; prepare the corpus again")
        corpus_tokenizer = load_tokenizer(root / "tokenizer")
        if tokenizer_hash(corpus_tokenizer) != expected_hash:
            raise UserError(
                f"data: the tokenizer in {str(root)!r} is not the one the corpus was made with "
                f"({meta['tokenizer'].get('name')}); prepare the corpus again"
            )
        corpus_tokenizer.name = meta["tokenizer"].get("name", corpus_tokenizer.name)
        difference = tokenizer_difference(corpus_tokenizer, tokenizer) if tokenizer is not None else None
        if tokenizer is not None and difference:
            raise UserError(
                f"tokenizer: {str(root)!r} was made with {corpus_tokenizer.name}, and not with {tokenizer.name} "
                f"({difference}); valid: its own tokenizer, or a corpus prepared with the other"
            )
        streams = {name: IndexedTokens(root / name) for name in expected_tokens}
        for name, stream in streams.items():
            if stream.num_tokens != expected_tokens[name]:
                raise UserError(
                    f"data: {str(root / name)!r} has {stream.num_tokens} tokens, but {META_FILE} says "
                    f"{expected_tokens[name]}; the files are of different corpora"
                )
        return cls(root, meta, corpus_tokenizer, streams["training"], streams["validation"])

    @classmethod
    def _open_again(cls, root: Path, meta: dict[str, Any], tokenizer: Tokenizer | None) -> Corpus:
        """Open what another rank has checked."""
        if is_prefix(root):
            assert tokenizer is not None
            return cls(root, meta, tokenizer, *split_prefix(IndexedTokens(root, check=False)))
        own = load_tokenizer(root / "tokenizer")
        own.name = meta["tokenizer"].get("name", own.name)
        training, validation = (
            IndexedTokens(root / name, check=False) for name in ("training", "validation")
        )
        return cls(root, meta, own, training, validation)

    def checked(self) -> Checked:
        """What ``open`` has checked, for other ranks."""
        return Checked(self.meta, _identities(self.folder))

    @property
    def name(self) -> str:
        """Name of the folder (or prefix)."""
        return self.folder.resolve().name


def _identities(root: Path) -> list[tuple[str, int, int, int]]:
    """See Checked.files: those of a corpus folder, or of a pair."""
    if is_prefix(root):
        paths = [bin_path(root), idx_path(root)]
    else:
        paths = [path for folder in (root, root / "tokenizer") for path in folder.glob("*") if path.is_file()]
    found = [(path, path.stat()) for path in sorted(paths) if path.is_file()]
    return [(path.name, entry.st_ino, entry.st_size, entry.st_mtime_ns) for path, entry in found]
