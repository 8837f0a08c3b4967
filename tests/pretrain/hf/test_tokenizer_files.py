"""Exported tokenizers give the run's ids, for any text."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.errors import UserError
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import (
    SENTENCEPIECE_OPTIONS,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
)
from pretrain.hf.open_model import load_exported_tokenizer
from pretrain.hf.tokenizer_files import check_tokenizer, describe_conventions, write_tokenizer
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from tests.helpers.corpora import byte_level
from tests.pretrain.data.test_tokenizer_folders import sentencepiece_with_a_prefix

SPACES = ["", " ", "  ", "   x", "a  b   c    d", "\n", "\n\n\n\n x\n", "\t\tdef f():\r\n", " " * 257]
CHARACTERS = [
    "▁",
    "▁▁ ▁x▁",
    " ▁ ",
    "naïve café 日本語 🙂🙂",
    "\x00\x01",
    "<0x41> <unk>",
    "a <unk> b<|endoftext|>c<|endoftext|><unk>",
    "x" * 300,
    "e\u0301",
]
AWKWARD = [*SPACES, *CHARACTERS]


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory):
    """The small corpus's SentencePiece tokenizer and its exported folder."""
    out = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(small.tokenizer, out, 64)
    return small.tokenizer, out


def test_ids_are_equal_on_awkward_texts(exported):
    ours, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in AWKWARD:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == ours.decode(ids) == text


@pytest.mark.slow
def test_ids_are_equal_on_real_text(exported):
    ours, folder = exported
    texts = [document.text for _, document in zip(range(40), BuiltinCorpus().documents(), strict=False)]
    assert check_tokenizer(folder, ours, texts)[0] > 100_000


@pytest.fixture(scope="module")
def backend(exported):
    return tokenizers.Tokenizer.from_file(str(exported[1] / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from(" \n\tab▁_é日=(")) | st.text())
def test_ids_are_equal_on_any_text(exported, backend, text):
    assert backend.encode(text, add_special_tokens=False).ids == exported[0].encode(text)


SPECIALS = [
    "<unk>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<0x41>",
    "\u2581",
    "\u00e9",
    "e\u0301",
    "  ",
    "\n",
    "a",
    " b",
]


def readers(folder):
    """What turns text into ids, by who reads the exported folder."""
    whole = AutoTokenizer.from_pretrained(folder)
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {
        "AutoTokenizer": lambda text: whole(text).input_ids,
        "tokenizer.json": lambda text: alone.encode(text).ids,
        "import": load_exported_tokenizer(folder, 10**6).encode,
        "import of tokenizer.json": load_tokenizer(folder).encode,
    }


@pytest.fixture(scope="module", params=["SentencePiece", "byte-level", "template", "no added tokens"])
def case(request, small, tmp_path_factory):
    """A run's tokenizer and the ways to read its exported folder."""
    root = tmp_path_factory.mktemp("case")
    tokenizer = small.tokenizer
    if request.param != "SentencePiece":
        backend = byte_level(300)
        if request.param == "template":
            backend.add_special_tokens(["<|begin_of_text|>"])
            backend.post_processor = tokenizers.processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 300)]
            )
        (root / "given").mkdir()
        backend.save(str(root / "given" / "tokenizer.json"))
        if request.param == "no added tokens":
            definition = json.loads((root / "given" / "tokenizer.json").read_text())
            (root / "given" / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": []}))
        tokenizer = load_tokenizer(root / "given")
    (root / "out").mkdir()
    write_tokenizer(tokenizer, root / "out", 64)
    AutoTokenizer.from_pretrained(root / "out").save_pretrained(root / "again")
    theirs = readers(root / "out")
    theirs["saved again"] = readers(root / "again")["AutoTokenizer"]
    theirs["saved again, imported"] = readers(root / "again")["import"]
    return tokenizer, theirs, root / "out"


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(SPECIALS) | st.text(max_size=5)).map("".join))
def test_every_reader_gives_the_runs_ids(case, text):
    expected = case[0].encode(text)
    for reader, encode in case[1].items():
        assert encode(text) == expected, reader


def test_what_the_export_does_is_said(case):
    tokenizer, _, folder = case
    assert check_tokenizer(folder, tokenizer, [])[1] == []
    said = " ".join(describe_conventions(tokenizer, folder))
    given = json.loads(tokenizer.definition()) if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    assert ("template" in said) == (given.get("post_processor") is not None)
    assert ("control strings" in said) == (not given.get("added_tokens"))


def test_a_reader_that_cannot_be_right_is_named(tmp_path):
    """One special text is a token for the run and the end of documents is text: transformers has no such
    setting."""
    backend = byte_level(300)
    definition = json.loads(backend.to_str())
    definition["added_tokens"][0] |= {"content": "a", "id": backend.token_to_id("a")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "out").mkdir()
    write_tokenizer(tokenizer, tmp_path / "out", 64)
    assert check_tokenizer(tmp_path / "out", tokenizer, [])[1] == [
        "read by AutoTokenizer, texts with '<|endoftext|>' get other ids than in training; tokenizer.json "
        "alone gives those of training; an import gives those of training"
    ]


def test_special_tokens_and_padding(exported):
    ours, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.end_of_document
    assert theirs.padding_side == "left" and theirs.model_max_length == 64
    assert theirs.model_input_names == ["input_ids", "attention_mask"]  # GPT-2 would add token_type_ids
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["model_input_names"] == theirs.model_input_names  # other versions have other defaults
    batch = theirs(["def f(x):", "x"], padding=True)
    assert batch["attention_mask"][1][0] == 0 and batch["attention_mask"][1][-1] == 1
    assert len(theirs) == ours.vocab_size
    assert (folder / "tokenizer.model").is_file()


def test_gpt2_tokenizers_are_written_as_they_are(gpt2_folder, tmp_path):
    ours = HuggingFaceTokenizer.from_folder(gpt2_folder)
    write_tokenizer(ours, tmp_path / "out", 1024)
    assert check_tokenizer(tmp_path / "out", ours, AWKWARD)[1] == []


def test_other_ids_are_noticed(exported, tmp_path, small_folder):
    _, folder = exported
    other = SentencePieceTokenizer.train(["another text, " * 200 + "with other pieces"], 280)
    with pytest.raises(UserError, match="gives other ids"):
        check_tokenizer(folder, other, ["with other pieces"])


MARKS = ["<|user|>", "<|user|>:", "\u2581\u2581", " no", "ab"]


def test_user_defined_symbols_are_tokens_wherever_they_are(tmp_path):
    """Also where neighbours could be joined across them, or one begins another."""
    model = io.BytesIO()
    texts = ["about a cab and the <|user|> tab", "  the user said: abc"] * 20
    options = SENTENCEPIECE_OPTIONS | {"user_defined_symbols": MARKS, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=300, **options
    )
    ours = SentencePieceTokenizer(model.getvalue(), "marks")
    write_tokenizer(ours, tmp_path, 64)
    compared, notes = check_tokenizer(tmp_path, ours, texts)
    assert compared > 100 and not notes
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("x<|user|>y", "<|user|>:a", "cabs   about no", "<|user|", *AWKWARD):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == text
    assert len(ours.encode("<|user|>")) == 1


def test_models_that_change_their_text_are_refused():
    with pytest.raises(UserError, match="changes its text"):
        byte_fallback_bpe(SentencePieceTokenizer(sentencepiece_with_a_prefix(), "foreign"))
