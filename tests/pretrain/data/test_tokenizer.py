"""Tokenizers: what is encoded is decoded, the ids are the libraries' own, bytes are counted exactly."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_hash,
)
from pretrain.runtime.signals import Stopped
from tests.helpers.gpt2 import PUBLISHED, write_gpt2
from tests.helpers.small_corpus import SMALL_VOCABULARY, WIKITEXT, small_paths

# What SentencePiece, its byte fallback, or our handling of U+2581 could mistake for something else.
AWKWARD = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\x0b\x0c\x85",
    "\u2028\u00a0\u3000",
    "\t\tx\r\n\t  y\n\n\n",
]
AWKWARD += ["\0", "a\0b", "\x1b\x7f", "\ufffd", "\ufeffx", "<unk>", "<s></s>", "<|endoftext|>", "<0x0A>"]
AWKWARD += ["\u2581", "\u2581\u2581 \u2581", " \u2581x", "x\u2581 ", "\u2585", "\u2047", " \u2047 "]
AWKWARD += ["\ue000\uf8ff\U000f0000"]
AWKWARD += ["é", "e\u0301", "\ufb01\u2460", "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467"]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
code_like = st.text(st.sampled_from(" \n\r\t\0\u2581ab_(<>0x:é\ue000"), max_size=60)


@pytest.fixture(scope="module")
def sentencepiece(small) -> SentencePieceTokenizer:
    return small.tokenizer


@pytest.fixture(scope="module")
def gpt2(gpt2_folder) -> Tokenizer:
    return load_tokenizer(gpt2_folder)


def check(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())
    assert tokenizer.end_of_document not in ids


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_text_survives(sentencepiece, text):
    check(sentencepiece, text)


@settings(max_examples=200, deadline=None)
@given(any_text | code_like)
def test_any_text_survives(sentencepiece, text):
    check(sentencepiece, text)


@settings(max_examples=50, deadline=None)
@given(any_text | code_like)
def test_any_text_survives_gpt2(gpt2, text):
    check(gpt2, text)


@settings(max_examples=50, deadline=None)
@given(st.lists(any_text | code_like, max_size=6))
def test_batches_are_the_texts_one_by_one(sentencepiece, texts):
    assert sentencepiece.encode_batch(texts) == [sentencepiece.encode(text) for text in texts]


def test_training_uses_text_around_nul_and_space_marks_and_learns_runs_of_spaces(sentencepiece):
    """Indentation is a large part of code; one token a space would make twice as many tokens."""
    tokenizer = SentencePieceTokenizer.train(["bcd\0bcd \u2581bcd\n" * 100], 266)
    assert len(tokenizer.encode("bcd")) == 1
    check(tokenizer, "bcd\0\u2581 a")
    assert len(sentencepiece.encode(" " * 8)) == 1 and len(sentencepiece.encode("):\n")) <= 2


def test_training_is_deterministic(tmp_path):
    texts = [path.read_text("utf-8") for path in small_paths()]
    first, second = (SentencePieceTokenizer.train(texts, SMALL_VOCABULARY) for _ in range(2))
    first.save(tmp_path / "one")
    second.save(tmp_path / "two")
    assert (tmp_path / "one/tokenizer.model").read_bytes() == (tmp_path / "two/tokenizer.model").read_bytes()
    assert first.vocab_size == SMALL_VOCABULARY and first.name == f"sentencepiece-{SMALL_VOCABULARY}"


@pytest.mark.parametrize("raised", [Stopped("SIGUSR1"), KeyboardInterrupt(), UserError("data: x is damaged")])
def test_what_reading_the_texts_raises_is_not_the_trainers_failure(raised):
    """SentencePiece would turn all of these into a RuntimeError of its own."""

    def texts():
        yield "some text\n" * 100
        raise raised

    with pytest.raises(type(raised)) as caught:
        SentencePieceTokenizer.train(texts(), 266)
    assert caught.value is raised


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("abc abc", 4096, "too many for so little text; valid: at most"),
        ("".join(map(chr, range(0x4E00, 0x4F00))) * 20, 300, "too few for the characters"),
        ("", 300, "no text"),
    ],
)
def test_vocabularies_that_cannot_be_trained_are_refused(text, size, message):
    with pytest.raises(UserError, match=message):
        SentencePieceTokenizer.train([text], size)


def test_saved_tokenizers_load_as_they_were(sentencepiece, tmp_path):
    sentencepiece.save(tmp_path)
    for source in (tmp_path, tmp_path / "tokenizer.model"):
        loaded = load_tokenizer(source)
        assert tokenizer_hash(loaded) == tokenizer_hash(sentencepiece)
        assert loaded.encode("x = [1]") == sentencepiece.encode("x = [1]")


def test_saved_gpt2_loads_as_it_was(gpt2, tmp_path):
    gpt2.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.end_of_document, loaded.vocab_size) == ("gpt2", 50256, 50257)
    assert tokenizer_hash(loaded) == tokenizer_hash(gpt2)
    assert loaded.encode("Hello  world") == gpt2.encode("Hello  world")


@pytest.mark.parametrize("text", PUBLISHED, ids=ascii)
def test_gpt2_gives_the_published_ids(gpt2, tmp_path, text):
    for tokenizer in (gpt2, load_tokenizer(write_gpt2(tmp_path / "gpt2"))):
        assert tokenizer.encode(text) == PUBLISHED[text] and tokenizer.decode(PUBLISHED[text]) == text
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50257, 50256)


def test_gpt2_gives_the_ids_of_the_library(gpt2, gpt2_folder):
    reference = tokenizers.ByteLevelBPETokenizer(
        str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt")
    )
    sources = [WIKITEXT] if WIKITEXT.is_file() else small_paths()
    text = "".join(path.read_text("utf-8") for path in sources)[:300_000]
    lines = text.splitlines(keepends=True)
    assert gpt2.encode_batch(lines) == [reference.encode(line).ids for line in lines]
    ids = gpt2.encode(text)
    assert ids == reference.encode(text).ids
    assert gpt2.decode(ids) == text
    assert int(gpt2.token_bytes()[ids].sum()) == len(text.encode())


def test_special_tokens_have_no_text_and_no_bytes(sentencepiece, gpt2):
    for tokenizer in (sentencepiece, gpt2):
        end = tokenizer.end_of_document
        assert tokenizer.decode([end, *tokenizer.encode("a b"), end]) == "a b"
        assert tokenizer.token_bytes()[end] == 0
    assert sentencepiece.decode(np.arange(2)) == ""


def test_incomplete_characters_are_decoded_as_replacement(sentencepiece):
    ids = sentencepiece.encode("😀")
    assert len(ids) == 4
    assert "\ufffd" in sentencepiece.decode(ids[:2])


def test_ids_beyond_the_vocabulary_are_refused(sentencepiece):
    for ids in ([0, SMALL_VOCABULARY], [-1]):
        with pytest.raises(UserError, match=rf"id {ids[-1]} is beyond .* valid: 0..{SMALL_VOCABULARY - 1}"):
            sentencepiece.decode(ids)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer"),
        ({"tokenizer.json": b"{"}, "cannot be read"),
        ({"tokenizer.model": b"junk"}, "not a SentencePiece model"),
        ({"tokenizer.model": b""}, "not a SentencePiece model"),
    ],
)
def test_folders_and_files_without_a_tokenizer_are_refused(tmp_path, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)
    if "tokenizer.json" in files:
        with pytest.raises(UserError, match=r"valid: a folder, or a SentencePiece \.model file"):
            load_tokenizer(tmp_path / "tokenizer.json")


def test_hub_names_go_through_the_hub(gpt2_folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: asked.append(name) or str(gpt2_folder))
    assert load_tokenizer("somebody/gpt2-like").name == "somebody/gpt2-like"
    assert asked == ["somebody/gpt2-like"]


def test_a_hub_name_may_have_a_sentencepiece_model_alone(small_folder, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(name, allow_patterns):
        assert "tokenizer.model" in allow_patterns
        shutil.copy(small_folder / "tokenizer/tokenizer.model", tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    here = load_tokenizer(small_folder / "tokenizer")
    assert load_tokenizer("somebody/llama-like").encode("def f(x):") == here.encode("def f(x):")


def test_hub_names_offline_are_refused_in_one_line(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("several\nlines\nof explanation")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(
        UserError, match=r"'gpt2' is not a local folder and cannot be fetched .*ConnectionError"
    ) as refusal:
        load_tokenizer("gpt2")
    assert "\n" not in str(refusal.value)


def test_end_of_document_comes_from_the_tokenizer_config(gpt2, tmp_path):
    gpt2.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "!"}}))
    assert load_tokenizer(tmp_path).end_of_document == 0
    config.write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(tmp_path)


def test_tokenizers_that_lose_text_have_no_byte_counts(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(UserError, match="byte-level or byte-fallback"):
        HuggingFaceTokenizer(words, "words").token_bytes()


def test_byte_fallback_tokenizers_of_hugging_face_count_bytes():
    """The kind that Llama and its relatives have: a space is U+2581, unknown characters are byte tokens."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "é"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence([steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = HuggingFaceTokenizer(backend, "llama-like")
    assert tokenizer.end_of_document == 1
    assert tokenizer.token_bytes()[vocabulary["\u2581a"]] == 2
    check(tokenizer, "a aé\n😀  b")


@pytest.mark.parametrize(
    "text", ["[]", "5", "[" * 10_000, '{"eos_token": 7}', '{"eos_token": {"content": [1]}}']
)
def test_a_tokenizer_config_that_makes_no_sense(tmp_path, text):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"^tokenizer: "):
        load_tokenizer(tmp_path)
