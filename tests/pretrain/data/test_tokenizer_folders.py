"""Which tokenizer a folder means: what transformers' AutoTokenizer takes. And which no new corpus is made
with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from model.errors import UserError
from pretrain.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from pretrain.prepare.make import make_corpus
from tests.helpers.corpora import TEXTS, byte_level
from tests.helpers.refusals import refused as refused_in_one_line
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


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
WRONG_IDS = [None, "7", 1.5, -1, 7, 1000, 2**31, 2**32 - 1, 2**32, 2**64, 10**30]
DEEP = "[" * 100_000 + "]" * 100_000


def damages() -> dict[str, tuple[str, Callable[[dict[str, Any]], object]]]:
    """By the file that is named: what is done to a sound definition of 300 tokens."""

    def put(place: str, value: object) -> Callable[[dict[str, Any]], object]:
        return lambda definition: definition.__setitem__(place, value)

    found: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {}

    def in_vocabulary(number: object) -> Callable[[dict[str, Any]], object]:
        return lambda definition: definition["model"]["vocab"].update(a=number)

    def added(number: object) -> Callable[[dict[str, Any]], object]:
        token = {"id": number, "content": "new word", **ADDED}
        return lambda definition: definition["added_tokens"].append(token)

    for number in WRONG_IDS:
        found[f"{number} in a vocabulary"] = ("tokenizer.json", in_vocabulary(number))
        found[f"{number} in vocab.json"] = ("vocab.json", in_vocabulary(number))
        found[f"{number} of an added token"] = ("tokenizer.json", added(number))
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor", "model", "added_tokens"):
        found[f"{part} of no kind"] = ("tokenizer.json", put(part, {"type": "nothing"}))
    found["a panic"] = (
        "tokenizer.json",
        put("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AA=="}),
    )
    found["no vocabulary"] = ("vocab.json", lambda d: d["model"].update(vocab=[]))
    found["an empty vocabulary"] = ("vocab.json", lambda d: d["model"].update(vocab={}))
    return found


DAMAGES = damages()


@pytest.mark.parametrize("kind", DAMAGES)
def test_wrong_values_are_refused_at_once_by_the_name_of_the_file(kind, tmp_path, capfd):
    file, damage = DAMAGES[kind]
    definition = json.loads(byte_level(300).to_str())
    damage(definition)
    content = definition if file == "tokenizer.json" else definition["model"]["vocab"]
    (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with refused_in_one_line(begins=f"tokenizer: '{tmp_path / file}' cannot be read: "):
        load_tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [DEEP, "\0", "\ud800", "5", '"', "{]", '{"eos_token": "\\ud800"}'])
def test_files_of_another_kind_are_refused_by_name(name, content, tmp_path):
    backend = byte_level(300)
    if name in ("tokenizer.json", "tokenizer_config.json"):
        backend.save(str(tmp_path / "tokenizer.json"))
    else:
        (tmp_path / "vocab.json").write_text(json.dumps(backend.get_vocab()))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with refused_in_one_line(begins="tokenizer: "):
        load_tokenizer(tmp_path)


def test_gaps_and_spellings_of_sentencepiece(tmp_path):
    backend = json.loads(byte_level(300).to_str())
    backend["model"]["vocab"]["later"] = 590
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    assert load_tokenizer(tmp_path).vocab_size == 591  # as tiktoken's vocabularies have them
    model = bytearray(SentencePieceTokenizer.train(TEXTS, 300).model_file)
    model[model.index(b"<0x41>")] = 0xFF
    (tmp_path / "t.model").write_bytes(model)
    with refused_in_one_line(f"'{tmp_path / 't.model'}' is not a SentencePiece model"):
        load_tokenizer(tmp_path / "t.model")
