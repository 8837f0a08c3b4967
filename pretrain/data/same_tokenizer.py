"""Compares two tokenizers: whether they give a text the same ids, and which parts differ if they do not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from model.errors import UserError
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, tokenizer_hash

AWKWARD_TEXTS = (
    "  two  spaces\n\n\ttabs\r\n",
    "▁ U+2581 ▁▁",
    "naïve 日本語 \N{GRINNING FACE}",
    " " * 33 + "x" + "\n" * 9 + "\t" * 5 + " " * 257,
    "e\u0301 \u00e9 \u212b \ufb01 \uff21",  # which normalization changes
    "\u00a0\u3000\u200b\u200d\u2028\u0085\ufeff\ufffd",
    "\0 a\0b \x1b\x7f \U0010ffff \ue000",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0e2a\u0e27\u0e31",
    "<0x41> <s></s> [UNK] [CLS] <pad> <|im_start|>",
    "DON'T don't 1234567 1,000.50",
)
"""Texts that tokenizers of one vocabulary may encode differently, besides their special texts."""


def tokenizer_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Name what gives *other* different ids than *one*; None when they give the same.

    Files need not be equal: transformers writes a tokenizer again with a post-processor, and lists special
    tokens of the vocabulary as added ones; a SentencePiece model may have become a ``tokenizer.json``. Only
    what turns text into ids is compared: vocabulary, merges, the steps before them, the end-of-document
    token, and the ids of awkward texts and of every special text.
    """
    if tokenizer_hash(one) == tokenizer_hash(other):
        return None
    definition, other_definition = _definition(one), _definition(other)
    parts = [
        part
        for part in dict.fromkeys([*definition, *other_definition])
        if definition.get(part) != other_definition.get(part)
    ]
    if parts:
        return f"different {', '.join(parts)}"
    specials = dict.fromkeys([*one.special_texts(), *other.special_texts()])
    for text in specials:
        if any(one.encode(each) != other.encode(each) for each in (text, put_inside(text))):
            return f"different ids for texts that contain {text!r:.80}"
    for text in AWKWARD_TEXTS:
        if one.encode(text) != other.encode(text):
            return f"different ids for {text!r:.80}"
    return None


def put_inside(special: str) -> str:
    """A text with the special text next to letters, to spaces and to itself."""
    return f"a{special} {special}{special}\n b {special}"


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
    """The parts of a ``tokenizer.json`` that determine ids. Settings that are off, and offsets,
    are left out."""
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
        "pre_tokenizer": _drop_offsets(definition.get("pre_tokenizer")),
        # Words that are cut out of the text before anything else.
        "added words": sorted(
            json.dumps({key: token[key] for key in sorted(token)}) for token in added if not token["special"]
        ),
    }


def _drop_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_offsets(inner) for key, inner in value.items() if key != "trim_offsets"}
    return [_drop_offsets(inner) for inner in value] if isinstance(value, list) else value
