"""Documents that are tokenized in pieces have the ids that they have whole."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest
import tokenizers

from pretrain.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from pretrain.prepare import long_texts
from pretrain.prepare.long_texts import encode_documents, encode_pieces
from tests.helpers.corpora import TEXTS, byte_level
from tests.helpers.marks import slow
from tests.helpers.small_corpus import small_paths

pytestmark = pytest.mark.takes_time
LENGTH = 10_000
DIGITS_BY_THREE = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = r"[^\n]+\n?|\n+"  # tokens of several words


def split_by(pattern: str) -> HuggingFaceTokenizer:
    backend = byte_level(300)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([path.read_text("utf-8") for path in small_paths()[:8]], trainer)
    return HuggingFaceTokenizer(backend, "split")


def lower_casing() -> HuggingFaceTokenizer:
    backend = byte_level(300)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase(), tokenizers.normalizers.Strip()]
    )
    return HuggingFaceTokenizer(backend, "lossy")


TOKENIZERS = {
    "as GPT-2": lambda: HuggingFaceTokenizer(byte_level(400), "bytes"),
    "digits by three": lambda: split_by(DIGITS_BY_THREE),
    "lines": lambda: split_by(LINES),
    "SentencePiece": lambda: SentencePieceTokenizer.train([*TEXTS, small_paths()[0].read_text("utf-8")], 500),
    "lossy": lower_casing,
}


def texts() -> dict[str, str]:
    """Long texts by kind: words, runs without any word, runs of one period, of wide characters, of marks."""
    chance = random.Random(0)

    def drawn(characters: str) -> str:
        return "".join(chance.choices(characters, k=LENGTH))

    code = "\n".join(path.read_text("utf-8") for path in small_paths()[:10])[:LENGTH]
    wide = "".join(map(chr, range(0x20000, 0x20200)))
    words = " ".join(drawn("ab")[: chance.randint(1, 12)] + " " * chance.randint(0, 40) for _ in range(1500))
    periods = {
        unit: unit * (LENGTH // len(unit)) for unit in ("a", "ab", " ", "\n", "1", "\u2581", "e\u0301", "😀")
    }
    alphabets = (
        "0123456789",
        string.ascii_letters,
        "ACGT",
        " \n",
        wide + "😀",
        string.printable + "éжЖ字😀\u0301\u2581",
    )
    special = ("a word <|endoftext|> and " * LENGTH)[:LENGTH]
    return {"code": code, "words": words, "special": special, **periods, **{a: drawn(a) for a in alphabets}}


@pytest.mark.parametrize("name", [*list(TOKENIZERS)[::3], *slow(["digits by three", "lines", "lossy"])])
def test_pieces_give_the_ids_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE", 1 << 11)
    monkeypatch.setattr(long_texts, "_OVERLAP", 1 << 7)
    tokenizer: Tokenizer = TOKENIZERS[name]()
    sizes: list[int] = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda batch: sizes.extend(map(len, batch)) or encode(batch)
    )
    for kind, text in texts().items():
        sizes.clear()
        pieces = [number for piece in encode_pieces(tokenizer, text) for number in piece]
        # Tokenizers that spell their text are never handed more than a piece, nor much of it twice.
        assert name == "lossy" or (max(sizes) == 1 << 11 and sum(sizes) < 1.3 * len(text)), kind[:20]
        assert pieces == tokenizer.encode(text), kind[:20]


def test_documents_keep_their_order_whatever_their_length(monkeypatch):
    monkeypatch.setattr(long_texts, "TOKENIZED_AT_ONCE", 1 << 9)
    monkeypatch.setattr(long_texts, "PIECE", 1 << 8)
    monkeypatch.setattr(long_texts, "_OVERLAP", 1 << 6)
    tokenizer = TOKENIZERS["as GPT-2"]()
    documents = [*TEXTS[:7], "one two three " * 90, "", *TEXTS[7:9], "x" * 2000, "y" * 600, "end"]
    tokens, lengths = zip(*encode_documents(tokenizer, iter(documents), np.dtype(np.uint16)), strict=True)
    expected = [[*tokenizer.encode(text), tokenizer.end_of_document] for text in documents]
    assert [count for counts in lengths for count in counts] == list(map(len, expected))
    assert np.concatenate(tokens).tolist() == [number for ids in expected for number in ids]
