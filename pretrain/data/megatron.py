"""Opens corpora written by Megatron-LM's ``preprocess_data``: a ``.bin/.idx`` pair and no other file."""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np
import xxhash

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.meta import CorpusMeta, SplitEntry, TokenizerEntry
from pretrain.data.tokenizer import Tokenizer
from pretrain.utils.files import update_from_file

# Validation takes the last documents that together hold at least this share of the tokens. Megatron-LM itself
# splits by position in the file (--split 969,30,1). Our own corpora are split by a hash of the text, which a
# pair lacks.
VALIDATION_SHARE = 0.05
_SAMPLE = 1 << 20  # bytes at both ends of the .bin that stand for its content


def is_prefix(path: Path) -> bool:
    """Whether *path* is the common beginning of a ``.bin/.idx`` pair (and not a folder)."""
    return not path.is_dir() and (idx_path(path).is_file() or bin_path(path).is_file())


def open_prefix(prefix: Path, tokenizer: Tokenizer) -> tuple[CorpusMeta, IndexedTokens, IndexedTokens]:
    """Open a pair: (metadata as in ``meta.json``, training documents, validation documents).

    Raises:
        UserError: damaged files, or fewer than two documents.
    """
    tokens = IndexedTokens(prefix)
    if tokens.num_documents < 2:
        raise UserError(
            f"data: {str(prefix)!r} has {tokens.num_documents} documents; needed: at least two, one for "
            "validation"
        )
    first = _first_of_validation(tokens)
    training, validation = tokens.slice(0, first), tokens.slice(first, tokens.num_documents)
    meta = CorpusMeta(
        source={"name": prefix.name, "format": "megatron"},
        content_hash=_content_hash(prefix),
        tokenizer=TokenizerEntry.from_tokenizer(tokenizer),
        dtype=tokens.dtype.name,
        split={"by": "position", "validation_share_of_tokens": VALIDATION_SHARE},
        skipped={},
        training=SplitEntry(training.num_documents, None, training.num_tokens),
        validation=SplitEntry(validation.num_documents, None, validation.num_tokens),
    )
    return meta, training, validation


def _first_of_validation(tokens: IndexedTokens) -> int:
    """Index of the first document held out: the last one that begins at or before the beginning of the share;
    never 0, so that something is left to train on."""
    split_position = tokens.num_tokens * (1 - VALIDATION_SHARE)
    after = bisect.bisect_right(range(tokens.num_documents), split_position, lo=2, key=tokens.start_of)
    return after - 1


def _content_hash(prefix: Path) -> str:
    """Hash of the index, the size of the token file, and both its ends: reading all of it would
    take minutes."""
    digest = xxhash.xxh3_128()
    update_from_file(digest, idx_path(prefix))
    path = bin_path(prefix)
    size = path.stat().st_size
    digest.update(np.int64(size).tobytes())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read())
    return digest.hexdigest()
