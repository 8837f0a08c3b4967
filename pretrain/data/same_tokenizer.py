"""Compares two tokenizers: whether they give a text the same ids, and what differs if they do not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from model.errors import UserError, shown
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, tokenizer_hash


def tokenizer_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Describe why *other* gives different ids than *one*; None when they give the same.

    Files need not be equal: transformers writes a tokenizer anew with a post-processor, and lists special tokens of the
    vocabulary as added ones; a SentencePiece model may have become a ``tokenizer.json``. Only what turns text into ids
    is compared: vocabulary, merges, the steps before them, and the end-of-document token. Whether a special token that
    is spelled out in a text becomes that token makes no difference: every id means the same.
    """
    if tokenizer_hash(one) == tokenizer_hash(other):
        return None
    definition, other_definition = _definition(one), _definition(other)
    differences = [
        _difference(part, definition.get(part), other_definition.get(part))
        for part in dict.fromkeys([*definition, *other_definition])
        if definition.get(part) != other_definition.get(part)
    ]
    return "; ".join(differences) or None


def _definition(tokenizer: Tokenizer) -> dict[str, Any]:
    """What determines the ids of a tokenizer, by a name for each part."""
    end = {"end of document": tokenizer.end_of_document}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _parts(json.loads(tokenizer.definition())) | end
    if isinstance(tokenizer, SentencePieceTokenizer):
        try:
            backend = byte_fallback_bpe(tokenizer)
        except UserError:  # a model that cannot be written as a tokenizer.json
            return {"SentencePiece model": hashlib.sha256(tokenizer.model_file).hexdigest()[:12]} | end
        return _parts(json.loads(backend.to_str())) | end
    return {"tokenizer": tokenizer_hash(tokenizer)[:12]} | end


def _parts(definition: dict[str, Any]) -> dict[str, Any]:
    """The parts of a ``tokenizer.json`` that determine ids. Settings that are off, and offsets, are left out."""
    model = dict(definition["model"])
    vocabulary = model.pop("vocab", None)
    added = definition.get("added_tokens") or []
    if isinstance(vocabulary, dict):
        vocabulary = vocabulary | {token["content"]: token["id"] for token in added}
    return {
        "vocabulary": vocabulary,
        "merges": model.pop("merges", None),
        **{f"model.{name}": value for name, value in model.items() if value},
        "normalizer": definition.get("normalizer"),
        "pre_tokenizer": _without_offsets(definition.get("pre_tokenizer")),
        # Words that are cut out of the text before anything else.
        "added words": sorted(
            json.dumps({key: token[key] for key in sorted(token)}) for token in added if not token["special"]
        ),
    }


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_offsets(inner) for key, inner in value.items() if key != "trim_offsets"}
    return [_without_offsets(inner) for inner in value] if isinstance(value, list) else value


def _difference(part: str, value: Any, other_value: Any) -> str:
    if part == "vocabulary" and isinstance(value, dict) and isinstance(other_value, dict):
        differing = [text for text in {**value, **other_value} if value.get(text) != other_value.get(text)]
        example = differing[0]
        ids = (_id(value.get(example)), _id(other_value.get(example)))
        return (
            f"vocabulary: {len(differing):,} of {len(value):,} and {len(other_value):,} entries differ, such as "
            f"{shown(example)} ({ids[0]}, and {ids[1]})"
        )
    if part == "merges" and isinstance(value, list) and isinstance(other_value, list):
        first = next(
            (index for index, (a, b) in enumerate(zip(value, other_value, strict=False)) if a != b), None
        )
        where = f"from number {first + 1:,} on" if first is not None else "in their number"
        return f"merges: {len(value):,} and {len(other_value):,}, which differ {where}"
    return f"{part}: {_short(value)} and {_short(other_value)}"


def _id(token: int | None) -> str:
    return "not there" if token is None else f"id {token}"


def _short(value: Any) -> str:
    return shown(value, plain=True) if value or value == 0 else "none"
