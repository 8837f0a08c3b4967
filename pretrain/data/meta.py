"""What ``meta.json`` of a corpus folder says, declared."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from model.declared import NonNegativeFloat, NonNegativeInt, PositiveInt, declared, from_dict, to_dict
from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer, tokenizer_hash
from pretrain.utils.files import InnerPath, read_regular
from pretrain.utils.parsing import parse_json

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256, hexadecimal."""
Short = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""An XXH3-128, hexadecimal."""
FORMAT_VERSION = 1
META_FILE = "meta.json"
PREPARE_AGAIN = "delete its folder and prepare the corpus again"
"""What to do about a damaged corpus: a folder that is there counts as done."""
_MOST_BYTES = 64 << 20


@declared("tokenizer")
class TokenizerEntry:
    """Identifies a corpus's tokenizer."""

    name: str
    hash: Digest
    """Of its definition: see tokenizer_hash."""
    vocab_size: PositiveInt
    end_of_document: NonNegativeInt

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenizerEntry:
        """The entry of *tokenizer*."""
        return cls(tokenizer.name, tokenizer_hash(tokenizer), tokenizer.vocab_size, tokenizer.end_of_document)


@declared("split")
class SplitEntry:
    """How large a split is."""

    documents: NonNegativeInt
    bytes: NonNegativeInt | None
    """UTF-8 bytes of its text; None if nobody knows (a bare .bin/.idx pair)."""
    tokens: NonNegativeInt
    of_each_class: list[NonNegativeInt] | None = None
    """Documents of each class, in a labelled corpus."""


@declared("file")
class FileEntry:
    """A file, as pretrain.utils.files.file_entry describes it."""

    bytes: NonNegativeInt
    xxh3_128: Short


@declared("document_lengths")
class Lengths:
    """Statistics of the documents' lengths in tokens."""

    mean: NonNegativeFloat
    shortest: NonNegativeInt
    p10: NonNegativeInt
    p50: NonNegativeInt
    p90: NonNegativeInt
    p99: NonNegativeInt
    longest: NonNegativeInt

    @classmethod
    def from_lengths(cls, lengths: np.ndarray) -> Lengths:
        """Those of documents of these *lengths*, of which there is one at least."""
        shares = {f"p{p}": int(np.percentile(lengths, p, method="higher")) for p in (10, 50, 90, 99)}
        mean = round(float(lengths.mean()), 1)
        return cls(mean=mean, shortest=int(lengths.min()), longest=int(lengths.max()), **shares)


@declared("meta")
class CorpusMeta:
    """``meta.json``; entries that do not apply are None, and left out of the file."""

    _: KW_ONLY
    format_version: Literal[1] = 1
    source: dict[str, Any]
    """Where the text comes from: its ``name`` and more."""
    source_files: dict[str, Any] | None = None
    """Number, bytes and hash of local files, in corpora of older versions."""
    content_hash: Digest | Short
    """Identifies the documents of both splits, whatever their tokens (of a bare pair: its files)."""
    classes: list[str] | None = None
    """Names of the classes of a labelled corpus."""
    tokenizer: TokenizerEntry
    dtype: str
    split: dict[str, Any]
    """How the documents were split."""
    skipped: dict[str, NonNegativeInt]
    """Number of documents left out, by reason."""
    training: SplitEntry
    validation: SplitEntry
    document_lengths: Lengths | None = None
    files: Annotated[dict[InnerPath, FileEntry], Field(min_length=1)] | None = None
    """The other files of the folder; None for a bare .bin/.idx pair."""
    request: dict[str, Any] | None = None
    """The request that made the corpus: the same request finds its work done."""

    @classmethod
    def read(cls, folder: Path) -> CorpusMeta:
        """Read it from a corpus folder.

        Raises:
            UserError: there is none, or it is damaged.
        """
        path = folder / META_FILE
        try:
            return from_dict(cls, parse_json(read_regular(path, _MOST_BYTES), META_FILE))
        except FileNotFoundError:
            raise UserError(
                f"data: {str(folder)!r} has no {META_FILE}; valid: a folder written by head-schedules prepare"
            ) from None
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(f"data: {str(path)!r} is damaged ({reason}); {PREPARE_AGAIN}") from None

    def write(self, folder: Path) -> None:
        """Write it into a corpus folder."""
        plain = {name: value for name, value in to_dict(self).items() if value is not None}
        for split in ("training", "validation"):
            plain[split] = {name: value for name, value in plain[split].items() if value is not None}
        (folder / META_FILE).write_text(json.dumps(plain, indent=2) + "\n", "utf-8")
