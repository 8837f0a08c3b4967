"""Reads the files of a tokenizer, and checks what the libraries do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.errors import UserError, quote
from pretrain.utils.files import read_regular

_MOST_BYTES = 1 << 28  # a vocabulary of 262,144 entries takes 33 MB


def read_file(path: Path) -> bytes:
    """The content of a tokenizer's file. UserError if it cannot be read."""
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"tokenizer: {str(path)!r} cannot be read: {error.strerror}") from error


def check_ids(vocabulary: Any) -> None:
    """Raise ValueError unless each token has a unique id, and at least half of 0 … the largest are taken:
    every id costs a row of the model's embeddings."""
    if not (isinstance(vocabulary, dict) and vocabulary):
        raise ValueError("no vocabulary: a mapping of tokens to ids")
    taken: dict[int, str] = {}
    for token, number in vocabulary.items():
        if not (type(number) is int and 0 <= number < 2 * len(vocabulary)):
            raise ValueError(
                f"the id of {quote(token)} is {quote(number)}; valid for {len(vocabulary):,} entries: whole "
                "numbers, each once, with fewer gaps than entries"
            )
        if number in taken:
            raise ValueError(f"{quote(taken[number])} and {quote(token)} have the same id, {number}")
        taken[number] = token


def call_quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the tokenizers library. Its panics are no Exceptions and print a dozen lines: here
    they are RuntimeErrors, and print nothing."""
    with Path(os.devnull).open("wb") as nowhere:
        error_output = os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 2)
            return function(*arguments)
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                raise RuntimeError(str(error)) from None
            raise
        finally:
            os.dup2(error_output, 2)
            os.close(error_output)
