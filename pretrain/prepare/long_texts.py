"""Tokenizes documents of any length in memory that grows by the text and its ids alone.

The libraries need up to two hundred bytes for each byte that they tokenize at once, so a long text is
tokenized in overlapping pieces.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer

TOKENIZED_AT_ONCE = 1 << 18
"""Characters of whole documents that are tokenized at once; a longer one is cut into pieces."""
PIECE = 1 << 16  # characters
_OVERLAP = 1 << 12  # characters at the end of a piece which the next one also tokenizes
_WORD_STARTS, _CUTS = 4, 8  # places tried: before words, and all in all


def encode_documents(
    tokenizer: Tokenizer, texts: Iterable[str], dtype: np.dtype[Any]
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """The tokens of *texts*: ``encode(text)`` and the end-of-document token each.

    Yields:
        Tokens of neighbouring texts, back to back, and the number of tokens of each of these texts.
    """
    end = tokenizer.end_of_document
    for is_long, group in itertools.groupby(texts, lambda text: len(text) > TOKENIZED_AT_ONCE):
        for text in group if is_long else ():
            ids = array(dtype.char)  # grows in place
            for piece in itertools.chain(encode_pieces(tokenizer, text), [[end]]):
                ids.frombytes(np.array(piece, dtype).tobytes())
            yield np.frombuffer(ids, dtype), [len(ids)]
        for batch in () if is_long else _batches(group):
            encoded = tokenizer.encode_batch(batch)
            for each in encoded:
                each.append(end)
            lengths = [len(each) for each in encoded]
            yield np.fromiter(itertools.chain.from_iterable(encoded), dtype, sum(lengths)), lengths


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= TOKENIZED_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """``encode(text)``, a piece at a time.

    A piece ends between two of its tokens, and the next begins there. Both have tokenized some thousand
    characters after that place: one without the text before them, one without the text after. Where their ids
    agree, neither matters there, and they are those of the whole text. What is left of a text without such a
    place, as with tokenizers that do not spell their text, is tokenized at once.
    """
    start, ids = 0, _ids(tokenizer, text[:PIECE])
    while start + PIECE < len(text):
        for token, place, sure in _cuts(tokenizer, text[start : start + PIECE], ids):
            following = _ids(tokenizer, text[start + place : start + place + PIECE])
            if token < sure and following[: sure - token] == ids[token:sure]:
                yield ids[:token]
                start, ids = start + place, following
                break
        else:
            yield _ids(tokenizer, text[start:])
            return
    yield ids


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0]


def _cuts(tokenizer: Tokenizer, piece: str, ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Places to cut *piece*: the number of tokens before, of characters before, and of tokens that the text
    after the piece would hardly change."""
    try:
        ends = np.cumsum(tokenizer.spelled_bytes()[ids])
    except UserError:  # its tokens have no bytes
        return
    data = np.frombuffer(piece.encode(), np.uint8)
    if not ids or ends[-1] != data.size:
        return
    stops = [len(piece[:stop].encode()) for stop in (PIECE // 2, -_OVERLAP, -_OVERLAP // 2)]
    first, last, sure = map(int, np.searchsorted(ends, stops, "right"))
    places = ends[first:last]
    is_character = (data[places] & 0xC0) != 0x80
    is_word = (data[places] <= 0x20) & (data[places - 1] > 0x20)
    words, others = (np.flatnonzero(chosen & is_character)[::-1] for chosen in (is_word, ~is_word))
    for index in [*words[:_WORD_STARTS], *others][:_CUTS]:
        yield first + int(index) + 1, len(data[: places[index]].tobytes().decode()), sure
