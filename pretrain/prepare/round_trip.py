"""Checks that a tokenizer is lossless on the text of a corpus that is to be made with it."""

from __future__ import annotations

from collections.abc import Iterable

from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer
from pretrain.prepare.sources.text_source import Document

CHECKED_CHARACTERS = 1 << 20
"""Of the first documents together."""
LONGEST = 1 << 16
"""Characters that are checked of each, its first ones."""
_SHOWN = 12  # characters on both sides of the first difference


def check_round_trip(tokenizer: Tokenizer, documents: Iterable[Document]) -> None:
    """Raise UserError if the ids of one of the first documents do not spell its text."""
    characters = 0
    for document in documents:
        text = document.text[:LONGEST]
        back = tokenizer.read_back(text)
        if back != text:
            pairs = enumerate(zip(text, back, strict=False))
            place = next((at for at, (one, other) in pairs if one != other), min(len(text), len(back)))
            part = slice(max(0, place - _SHOWN), place + _SHOWN)
            raise UserError(
                f"tokenizer: {tokenizer.name} is not lossless: {text[part]!r} in {document.path_or_id} "
                f"decodes to {back[part]!r}; valid: a lossless one, such as gpt2 or a trained one "
                "(--train_tokenizer N), or --lossy_tokenizer to accept this one"
            )
        characters += len(text)
        if characters >= CHECKED_CHARACTERS:
            return
