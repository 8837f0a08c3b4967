"""A tokenizer that is not lossless makes no corpus, unless it is asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from pretrain.data.corpus import Corpus
from pretrain.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from pretrain.prepare.command import main
from tests.helpers.corpora import TEXTS, byte_level, texts_of
from tests.helpers.refusals import refusal

TEXT = "  Caf\u00e9 and cafe\u0301, \ufb01ve \U0001d400s, HELLO  World \u5b57\U0001f600\tend \n"


def normalizing(normalizer: normalizers.Normalizer) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        backend = byte_level(300)
        backend.normalizer = normalizer
        backend.save(str(folder / "tokenizer.json"))

    return write


def without_bytes(folder: Path) -> None:
    """BPE that should spell unknown characters in bytes, and has none of these."""
    characters = sorted(set("".join(TEXTS)))
    vocabulary = {name: number for number, name in enumerate(["<|endoftext|>", "<unk>", *characters])}
    backend = byte_level(300)
    backend.model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend.pre_tokenizer, backend.decoder = None, decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))


def bare_files(folder: Path) -> None:
    """As GPT-2 has it, without the token of a byte that the text needs."""
    backend = json.loads(byte_level(300).to_str())["model"]
    kept = [token for token in backend["vocab"] if token != "H"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(kept)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def sentencepiece_model(**options: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        model = io.BytesIO()
        given: dict[str, Any] = {
            "vocab_size": 330,
            "model_type": "bpe",
            "byte_fallback": True,
            "add_dummy_prefix": False,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=model, minloglevel=2, **(given | options)
        )
        (folder / "tokenizer.model").write_bytes(model.getvalue())

    return write


LOSSY = {
    "lower case": normalizing(normalizers.Lowercase()),
    "NFC": normalizing(normalizers.NFC()),
    "NFD": normalizing(normalizers.NFD()),
    "NFKC": normalizing(normalizers.NFKC()),
    "no accents": normalizing(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "stripping": normalizing(normalizers.Strip()),
    "a space before": normalizing(normalizers.Prepend(" ")),
    "single spaces": normalizing(normalizers.Replace("  ", " ")),
    "dropped characters": normalizing(normalizers.Replace("\U0001f600", "")),
    "BERT": normalizing(normalizers.BertNormalizer()),
    "unknown tokens": without_bytes,
    "bare files": bare_files,
    "SentencePiece NFKC": sentencepiece_model(remove_extra_whitespaces=False),
    "SentencePiece spaces": sentencepiece_model(normalization_rule_name="identity"),
    "SentencePiece unknown": sentencepiece_model(byte_fallback=False, normalization_rule_name="identity"),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_a_tokenizer_that_changes_the_text_is_refused_or_recorded(kind, tmp_path, capsys):
    tokenizer, texts, out = tmp_path / "tokenizer", tmp_path / "texts.json", tmp_path / "out"
    tokenizer.mkdir()
    LOSSY[kind](tokenizer)
    texts.write_text(json.dumps(["plain text", TEXT, "the end"]))
    examples = tmp_path / "examples.jsonl"
    lines = [{"text": text, "label": label} for label in "ab" for text in ("plain " + label, TEXT + label)]
    examples.write_text("\n".join(map(json.dumps, lines)))
    for command in (["--text", texts], ["labelled", "--train", examples]):
        arguments = [*command, "--tokenizer", tokenizer, "--out", out]
        line = refusal(capsys, main, *arguments)
        assert "is not lossless: '" in line and "--lossy_tokenizer" in line and len(line) < 400
        assert [path.name for path in tmp_path.glob("*out*")] in ([], [".out.lock"])
    arguments = [
        "--text",
        texts,
        "--tokenizer",
        tokenizer,
        "--out",
        out,
        "--processes",
        1,
        "--lossy_tokenizer",
    ]
    assert main([*map(str, arguments)]) == 0
    assert "; taken as lossy" in capsys.readouterr().out
    assert Corpus.open(out).meta.request["lossy_tokenizer"] is True


def lossless() -> list[Tokenizer]:
    added = byte_level(300)
    added.add_tokens(["a token of words"])
    return [
        HuggingFaceTokenizer(byte_level(300), "bytes"),
        HuggingFaceTokenizer(added, "added"),
        SentencePieceTokenizer.train(TEXTS, 300),
    ]


TOKENIZERS = lossless()
PIECES = [
    "<|endoftext|>",
    "a token of words",
    "\u2581",
    "\ufffd",
    "\r\n",
    "  ",
    "\u0301",
    "<unk>",
    "<0x41>",
    TEXT,
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.sampled_from(PIECES))
    )
)
def test_no_false_alarm_for_byte_level_tokenizers(parts):
    text = "".join(parts)
    for tokenizer in TOKENIZERS:
        assert tokenizer.read_back(text) == text


def test_documents_beyond_the_first_are_not_read_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pretrain.prepare.round_trip.CHECKED_CHARACTERS", 100)
    LOSSY["lower case"](tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(["lower case " * 10, "UPPER CASE"]))
    common = f"--tokenizer {tmp_path} --processes 1 --out {tmp_path}"
    assert main(f"--text {tmp_path}/texts.json {common}/out".split()) == 0
    corpus = Corpus.open(tmp_path / "out")
    assert "upper case" in texts_of(corpus, "training") + texts_of(corpus, "validation")
    (tmp_path / "held_out.json").write_text(json.dumps(["x " * 100]))
    both = f"--text {tmp_path}/held_out.json --validation_text {tmp_path}/texts.json {common}/other"
    assert main(both.split()) == 0
    both = f"--text {tmp_path}/held_out.json --validation_text {tmp_path}/upper.json {common}/third"
    (tmp_path / "upper.json").write_text(json.dumps(["UPPER CASE"]))
    assert "'UPPER CASE' in upper.json" in refusal(capsys, main, *both.split())
