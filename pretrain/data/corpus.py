"""Opens a prepared corpus for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.megatron import is_prefix, open_prefix
from pretrain.data.meta import META_FILE, CorpusMeta, TokenizerEntry
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer


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
    def open(cls, folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> Corpus:
        """Open a folder written by ``prepare``, or the prefix of a ``.bin/.idx`` pair of Megatron's tools.

        Args:
            tokenizer: what a pair was made with (it does not say). A folder has its own, and refuses a
                different one.

        Raises:
            UserError: *folder* is neither, a file is damaged, or the tokenizer is missing or different.
        """
        root = Path(folder)
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
        own = load_tokenizer(root / "tokenizer")
        own.name = meta.tokenizer.name
        corpus = cls(root, meta, own, IndexedTokens(root / "training"), IndexedTokens(root / "validation"))
        corpus._check(tokenizer)
        return corpus

    def _check(self, tokenizer: Tokenizer | None) -> None:
        """Raise UserError if the files of the folder do not belong together, or to *tokenizer*."""
        place, own, meta = str(self.folder), self.tokenizer, self.meta
        entry_of_own = TokenizerEntry.from_tokenizer(own)
        claims: list[tuple[str, object, object]] = [
            (f"tokenizer.{name}", getattr(meta.tokenizer, name), getattr(entry_of_own, name))
            for name in ("hash", "vocab_size", "end_of_document")
        ]
        for name in ("training", "validation"):
            split, entry = getattr(self, name), getattr(meta, name)
            claims += [
                ("dtype", meta.dtype, split.dtype.name),
                (f"{name}.tokens", entry.tokens, split.num_tokens),
                (f"{name}.documents", entry.documents, split.num_documents),
            ]
            if entry.of_each_class is not None:
                claims.append((f"the sum of {name}.of_each_class", sum(entry.of_each_class), entry.documents))
            for path in (bin_path(self.folder / name), idx_path(self.folder / name)):
                file = (meta.files or {}).get(path.name)
                claims.append((f"files.{path.name}.bytes", file and file.bytes, path.stat().st_size))
        for key, said, found in claims:
            if said != found:
                raise UserError(
                    f"data: {META_FILE} in {place!r} says that {key} is {said}, but it is {found}: the files "
                    "are of different corpora; prepare the corpus again"
                )
        difference = tokenizer_difference(own, tokenizer) if tokenizer is not None else None
        if tokenizer is not None and difference:
            raise UserError(
                f"tokenizer: {place!r} was made with {own.name}, and not with {tokenizer.name} "
                f"({difference}); valid: its own tokenizer, or a corpus prepared with the other"
            )

    @property
    def name(self) -> str:
        """Name of the folder (or prefix)."""
        return self.folder.resolve().name
