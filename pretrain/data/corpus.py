"""Opens a prepared corpus for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.megatron import is_prefix, open_prefix
from pretrain.data.meta import META_FILE, CorpusMeta
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash


@dataclass(frozen=True)
class Checked:
    """What one rank has checked of a corpus. Others open the same files with it, and do not check
    them again."""

    meta: CorpusMeta
    files: list[tuple[str, int, int, int]]
    """Name, inode number, bytes and modification time (ns) of each file: equal on all nodes of a shared file
    system, and different for a copy on another disk."""


@dataclass(frozen=True)
class Corpus:
    """An opened corpus folder."""

    folder: Path
    meta: CorpusMeta
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
            tokenizer: what a pair was made with (it does not say). A folder has its own, and refuses a
                different one.
            checked: ``checked()`` of a rank that opened this corpus with the same tokenizer. If the files are
                the same, then the index, the hashes and the tokenizer are not looked at again.

        Raises:
            UserError: *folder* is neither, a file is damaged, or the tokenizer is missing or different.
        """
        root = Path(folder)
        trusted = checked.meta if checked is not None and checked.files == _identities(root) else None
        if is_prefix(root):
            if tokenizer is None:
                raise UserError(
                    f"data: {str(root)!r} is a .bin/.idx pair, which does not say its tokenizer; give "
                    "--tokenizer, such as --tokenizer gpt2"
                )
            meta, training, validation = open_prefix(root, tokenizer, trusted)
            return cls(root, meta, tokenizer, training, validation)
        if not root.is_dir():
            raise UserError(
                f"data: {str(root)!r} is not a folder; valid: one written by python -m pretrain.prepare"
            )
        meta = trusted or CorpusMeta.read(root)
        if not (root / "tokenizer").is_dir():
            raise UserError(f"data: {str(root)!r} has no tokenizer folder; prepare the corpus again")
        own = load_tokenizer(root / "tokenizer")
        own.name = meta.tokenizer.name
        streams = {name: IndexedTokens(root / name, check=not trusted) for name in ("training", "validation")}
        corpus = cls(root, meta, own, **streams)
        if not trusted:
            corpus._check(tokenizer)
        return corpus

    def _check(self, tokenizer: Tokenizer | None) -> None:
        """Raise UserError if the files of the folder do not belong together, or to *tokenizer*."""
        place, own = str(self.folder), self.tokenizer
        if tokenizer_hash(own) != self.meta.tokenizer.hash:
            raise UserError(
                f"data: the tokenizer in {place!r} is not the one the corpus was made with ({own.name}); "
                "prepare the corpus again"
            )
        difference = tokenizer_difference(own, tokenizer) if tokenizer is not None else None
        if tokenizer is not None and difference:
            raise UserError(
                f"tokenizer: {place!r} was made with {own.name}, and not with {tokenizer.name} "
                f"({difference}); valid: its own tokenizer, or a corpus prepared with the other"
            )
        for name in ("training", "validation"):
            tokens, expected = getattr(self, name).num_tokens, getattr(self.meta, name).tokens
            if tokens != expected:
                raise UserError(
                    f"data: {str(self.folder / name)!r} has {tokens} tokens, but {META_FILE} says "
                    f"{expected}; the files are of different corpora"
                )

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
