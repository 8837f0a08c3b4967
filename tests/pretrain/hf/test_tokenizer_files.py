"""Exported tokenizers give the run's ids, for any text."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.errors import UserError
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer
from pretrain.hf.tokenizer_files import check_tokenizer, write_tokenizer
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from tests.pretrain.data.test_tokenizer_folders import sentencepiece_with_a_prefix

SPACES = ["", " ", "  ", "   x", "a  b   c    d", "\n", "\n\n\n\n x\n", "\t\tdef f():\r\n", " " * 257]
CHARACTERS = [
    "▁",
    "▁▁ ▁x▁",
    " ▁ ",
    "naïve café 日本語 🙂🙂",
    "\x00\x01",
    "<0x41> <unk>",
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
        if "<unk>" not in text:  # a special token's own spelling is that token, as everywhere in transformers
            assert ids == ours.encode(text), text
            assert theirs.decode(ids) == ours.decode(ids) == text


def test_ids_are_equal_on_real_text(exported):
    ours, folder = exported
    texts = [document.text for _, document in zip(range(40), BuiltinCorpus().documents(), strict=False)]
    assert check_tokenizer(folder, ours, texts) > 100_000


@pytest.fixture(scope="module")
def backend(exported):
    return tokenizers.Tokenizer.from_file(str(exported[1] / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from(" \n\tab▁_é日=(")) | st.text())
def test_ids_are_equal_on_any_text(exported, backend, text):
    assert backend.encode(text, add_special_tokens=False).ids == exported[0].encode(text)


def test_special_tokens_and_padding(exported):
    ours, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.end_of_document
    assert theirs.padding_side == "left" and theirs.model_max_length == 64
    batch = theirs(["def f(x):", "x"], padding=True)
    assert batch["attention_mask"][1][0] == 0 and batch["attention_mask"][1][-1] == 1
    assert len(theirs) == ours.vocab_size
    assert (folder / "tokenizer.model").is_file()


def test_gpt2_tokenizers_are_written_as_they_are(gpt2_folder, tmp_path):
    ours = HuggingFaceTokenizer.from_folder(gpt2_folder)
    write_tokenizer(ours, tmp_path / "out", 1024)
    assert check_tokenizer(tmp_path / "out", ours, AWKWARD) > 0


def test_other_ids_are_noticed(exported, tmp_path, small_folder):
    _, folder = exported
    other = SentencePieceTokenizer.train(["another text, " * 200 + "with other pieces"], 280)
    with pytest.raises(UserError, match="gives other ids"):
        check_tokenizer(folder, other, ["with other pieces"])


def test_models_that_change_their_text_are_refused():
    with pytest.raises(UserError, match="changes its text"):
        byte_fallback_bpe(SentencePieceTokenizer(sentencepiece_with_a_prefix(), "foreign"))
