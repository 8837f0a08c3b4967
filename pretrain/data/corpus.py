"""Opens a prepared corpus for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.megatron import is_prefix, open_prefix, split_prefix
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
        if checked is not None and checked.files == _identities(root):
            return cls._open_again(root, checked.meta, tokenizer)
        if is_prefix(root):
            if tokenizer is None:
                raise UserError(
                    f"data: {str(root)!r} is a .bin/.idx pair, which does not say its tokenizer; give "
                    "--tokenizer, such as --tokenizer gpt2"
                )
            meta, training, validation = open_prefix(root, tokenizer)
            return cls(root, meta, tokenizer, training, validation)
        if not root.is_dir():
            raise UserError(
                f"data: {str(root)!r} is not a folder; valid: one written by python -m pretrain.prepare"
            )
        meta = CorpusMeta.read(root)
        if not (root / "tokenizer").is_dir():
            raise UserError(f"data: {str(root)!r} has no tokenizer folder; prepare the corpus again")
        corpus_tokenizer = load_tokenizer(root / "tokenizer")
        if tokenizer_hash(corpus_tokenizer) != meta.tokenizer.hash:
            raise UserError(
                f"data: the tokenizer in {str(root)!r} is not the one the corpus was made with "
                f"({meta.tokenizer.name}); prepare the corpus again"
            )
        corpus_tokenizer.name = meta.tokenizer.name
        difference = tokenizer_difference(corpus_tokenizer, tokenizer) if tokenizer is not None else None
        if tokenizer is not None and difference:
            raise UserError(
                f"tokenizer: {str(root)!r} was made with {corpus_tokenizer.name}, and not with "
                f"{tokenizer.name} ({difference}); valid: its own tokenizer, or a corpus prepared with the "
                "other"
            )
        splits = {"training": meta.training, "validation": meta.validation}
        streams = {name: IndexedTokens(root / name) for name in splits}
        for name, stream in streams.items():
            if stream.num_tokens != splits[name].tokens:
                raise UserError(
                    f"data: {str(root / name)!r} has {stream.num_tokens} tokens, but {META_FILE} says "
                    f"{splits[name].tokens}; the files are of different corpora"
                )
        return cls(root, meta, corpus_tokenizer, streams["training"], streams["validation"])

    @classmethod
    def _open_again(cls, root: Path, meta: CorpusMeta, tokenizer: Tokenizer | None) -> Corpus:
        """Open what another rank has checked."""
        if is_prefix(root):
            assert tokenizer is not None
            return cls(root, meta, tokenizer, *split_prefix(IndexedTokens(root, check=False)))
        own = load_tokenizer(root / "tokenizer")
        own.name = meta.tokenizer.name
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
