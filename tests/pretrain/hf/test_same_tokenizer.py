"""Tokenizers are compared by what determines ids, whatever wrote their files."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from model.errors import UserError
from model.presets import preset
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.data.corpus import Corpus
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.sequences import TrainingSequences
from pretrain.data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    tokenizer_hash,
)
from pretrain.hf.tokenizer_files import write_tokenizer
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles
from pretrain.run.resume import check_resume
from tests.helpers.corpora import TEXTS, byte_level


def byte_level_folder(folder, vocab_size=300):
    """Byte-level BPE in a folder of vocab.json and merges.txt, as GPT-2's is."""
    folder.mkdir()
    byte_level(vocab_size).model.save(str(folder))
    return HuggingFaceTokenizer.from_folder(folder)


def written_again(tokenizer, folder):
    """The folder of an export of *tokenizer* that transformers has loaded and saved."""
    (folder / "export").mkdir()
    write_tokenizer(tokenizer, folder / "export", 64)
    AutoTokenizer.from_pretrained(folder / "export").save_pretrained(folder / "again")
    return folder / "again"


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_a_tokenizer_that_transformers_has_saved_is_the_same(tmp_path, kind):
    if kind == "byte-level":
        ours = byte_level_folder(tmp_path / "files")
    else:
        ours = SentencePieceTokenizer.train(TEXTS, 290)
    again = load_tokenizer(written_again(ours, tmp_path))
    assert tokenizer_hash(again) != tokenizer_hash(ours)  # else there is nothing to test
    assert tokenizer_difference(ours, again) is None
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def change(folder, **parts):
    """The tokenizer of *folder*, with other parts in its tokenizer.json."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    definition = json.loads((other / "tokenizer.json").read_text())
    for name, edit in parts.items():
        definition[name] = edit(definition[name])
    (other / "tokenizer.json").write_text(json.dumps(definition))
    return load_tokenizer(other)


def exchanged(model):
    """Two entries of the vocabulary have changed places."""
    first, second = "0", "1"
    vocabulary = model["vocab"]
    return model | {"vocab": vocabulary | {first: vocabulary[second], second: vocabulary[first]}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": exchanged}, "different vocabulary"),
        (
            {"model": lambda model: model | {"merges": model["merges"][1:] + model["merges"][:1]}},
            "different merges",
        ),
        ({"normalizer": lambda _: {"type": "NFC"}}, "different normalizer"),
        ({"pre_tokenizer": lambda old: old | {"add_prefix_space": True}}, "different pre_tokenizer"),
        (
            {"added_tokens": lambda old: [*old, old[0] | {"id": 65, "content": "a", "special": False}]},
            "different added words",
        ),
    ],
)
def test_what_differs_is_said_in_words(tmp_path, parts, words):
    folder = written_again(byte_level_folder(tmp_path / "files"), tmp_path)
    assert tokenizer_difference(load_tokenizer(folder), change(folder, **parts)) == words


def test_a_control_string_that_is_text_for_one_of_them(tmp_path):
    folder = written_again(byte_level_folder(tmp_path / "files"), tmp_path)
    ours = load_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": False}))
    other = load_tokenizer(folder)
    assert tokenizer_hash(other) != tokenizer_hash(ours)
    assert tokenizer_difference(ours, other) == "different ids for texts that contain '<|endoftext|>'"
    ours.save(tmp_path / "saved")
    assert tokenizer_hash(load_tokenizer(tmp_path / "saved")) == tokenizer_hash(ours)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": "yes"}))
    with pytest.raises(UserError, match=r"split_special_tokens in .* is 'yes'; valid: true or false"):
        load_tokenizer(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus made with a byte-level tokenizer, and the folder of the same tokenizer saved by
    transformers."""
    root = tmp_path_factory.mktemp("corpus")
    ours = byte_level_folder(root / "files")
    files = []
    for number, text in enumerate(TEXTS[:20]):
        files.append((f"{number}.txt", root / f"{number}.txt"))
        files[-1][1].write_text(text * 4)
    folder = make_corpus(PlainFiles("text", files), root / "corpus", ours)
    return folder, written_again(ours, root)


def test_a_corpus_opens_with_the_same_tokenizer_and_no_other(corpus, tmp_path):
    folder, again = corpus
    opened = Corpus.open(folder, load_tokenizer(again))
    shutil.copytree(folder, tmp_path / "blend")
    meta = json.loads((folder / "meta.json").read_text())
    shutil.rmtree(tmp_path / "blend" / "tokenizer")
    shutil.copytree(again, tmp_path / "blend" / "tokenizer")
    meta["tokenizer"]["hash"] = tokenizer_hash(load_tokenizer(again))
    (tmp_path / "blend" / "meta.json").write_text(json.dumps(meta))
    assert TrainingSequences([(opened, 1), (Corpus.open(tmp_path / "blend"), 1)], 16, 0).windows
    with pytest.raises(UserError, match=r"^tokenizer: .* was made with .*\(different vocabulary"):
        Corpus.open(folder, byte_level_folder(tmp_path / "small", 280))


def test_a_run_goes_on_with_the_same_tokenizer_and_no_other(corpus, tmp_path):
    folder, again = corpus
    run, model, opened = RunConfig(runs_dir=str(tmp_path)), preset("prism-tiny"), Corpus.open(folder)
    imported = tokenizer_hash(load_tokenizer(again))
    saved = TrainingState(model=model.to_json(), data=DataIdentity(imported))
    state = TrainingState(data=DataIdentity(opened.meta.tokenizer.hash, [("c", "1")]))
    check_resume(saved, state, run, model, (again, opened.tokenizer))
    other = byte_level_folder(tmp_path / "small", 280)
    with pytest.raises(UserError, match=r"tokenizer: different vocabulary"):
        check_resume(saved, state, run, model, (again, other))
