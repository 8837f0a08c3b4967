"""Which tokenizer a folder means: what transformers' AutoTokenizer takes. And which no new corpus is made
with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tokenizers

from model.errors import UserError
from pretrain.data.making.make import make_corpus
from pretrain.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from tests.helpers.corpora import TEXTS, byte_level
from tests.helpers.small_corpus import small_source

SAMPLE = "the bottles  stand\non a shelf"


def sentencepiece_with_a_prefix() -> bytes:
    """A model as Llama 2 has it: byte-fallback BPE that puts a space before the text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("with_model", [True, False])
def test_of_several_files_the_one_that_transformers_takes_counts(tmp_path, with_model):
    transformers = pytest.importorskip("transformers")
    backend = byte_level(300)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if with_model:
        SentencePieceTokenizer.train(TEXTS, 290).save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.encode(SAMPLE) == theirs.encode(SAMPLE, add_special_tokens=False)
    assert loaded.vocab_size == len(theirs) == 300
    assert loaded.end_of_document == theirs.eos_token_id


def refused(folder: Path, message: str) -> None:
    """A corpus cannot be made, and nothing of one is left."""
    with pytest.raises(UserError, match=message) as error:
        make_corpus(small_source(2), folder / "out", load_tokenizer(folder))
    assert "\n" not in str(error.value)
    assert not [path for path in folder.iterdir() if "out" in path.name]


def test_unigram_is_refused_before_any_work(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    refused(tmp_path, "its model is Unigram.; valid: byte-level or byte-fallback BPE")


def test_a_space_before_the_text_is_refused_before_any_work(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_with_a_prefix())
    refused(tmp_path, "adds a space before the text .*; valid: .* tokenizer.json, or .*--train_tokenizer N")
