"""A validation text of one's own: files, or a split."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.prepare import command
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import Preparation, make_corpus
from pretrain.prepare.sources.files import TextFiles
from pretrain.prepare.sources.with_validation import WithValidation
from tests.helpers.corpora import contents, texts_of

TRAINING = [f"{number} bottles on shelf {number * 7}\n" * 5 for number in range(60)]
HELD_OUT = [f"{number} cans below shelf {number * 3}\n" * 5 for number in range(7)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, documents in (("training", TRAINING), ("held_out", HELD_OUT)):
        (folder / name).mkdir()
        for number, text in enumerate(documents):
            (folder / name / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset") / "data"
    folder.mkdir()
    for split, documents in (("train", TRAINING), ("validation", HELD_OUT)):
        table = pyarrow.table({"text": documents})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder.parent


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def check(folder: Path) -> None:
    corpus = Corpus.open(folder)
    assert texts_of(corpus, "training") == TRAINING
    assert texts_of(corpus, "validation") == HELD_OUT
    assert corpus.meta.split == {"by": "a source of its own"}


def test_files_of_their_own_are_the_validation_split(texts, tmp_path, capsys):
    arguments = ["--text", texts / "training", "--validation_text", texts / "held_out"]
    assert run(*arguments, "--train_tokenizer", 300, "--out", tmp_path / "out") == 0
    check(tmp_path / "out")
    assert "held out    name text, files 7" in capsys.readouterr().out
    assert run(*arguments, "--train_tokenizer", 300, "--out", tmp_path / "out") == 0, "it is there"
    assert run("--text", texts / "training", "--train_tokenizer", 300, "--out", tmp_path / "out") == 2
    assert "holds another corpus (differs in source)" in capsys.readouterr().err


def test_the_tokenizer_learns_from_the_training_text_only(texts, tmp_path):
    training = TextFiles([texts / "training"])
    one = make_corpus(training, tmp_path / "a", 300, Selection(0.02))
    other = make_corpus(WithValidation(training, TextFiles([texts / "held_out"])), tmp_path / "b", 300)
    assert Corpus.open(other).tokenizer.encode("cans") == [
        token for letter in "cans" for token in Corpus.open(other).tokenizer.encode(letter)
    ], "a word of the held-out text alone"
    assert Corpus.open(one).tokenizer.vocab_size == Corpus.open(other).tokenizer.vocab_size


@pytest.mark.slow
def test_shares_processes_and_a_kill_give_the_same_folder(small, texts, tmp_path, monkeypatch):
    def source() -> WithValidation:
        return WithValidation(
            TextFiles([texts / "training"], unit_bytes=500), TextFiles([texts / "held_out"], unit_bytes=300)
        )

    whole = contents(make_corpus(source(), tmp_path / "whole", small.tokenizer))
    check(tmp_path / "whole")
    assert contents(Preparation(source(), tmp_path / "two", small.tokenizer, processes=2).make()) == whole
    preparation = Preparation(source(), tmp_path / "shares", small.tokenizer)
    assert [preparation.make_share(number, 3) for number in (2, 0, 1)] == [None, None, tmp_path / "shares"]
    assert contents(tmp_path / "shares") == whole
    with monkeypatch.context() as patched:
        stop = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        patched.setattr(Preparation, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            make_corpus(source(), tmp_path / "killed", small.tokenizer)
    assert contents(make_corpus(source(), tmp_path / "killed", small.tokenizer)) == whole


def test_duplicates_and_the_cap_spare_the_held_out_text(small, texts, tmp_path):
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "a.txt").write_text(HELD_OUT[2])
    (tmp_path / "copies" / "b.txt").write_text(TRAINING[0])
    (tmp_path / "copies" / "c.txt").write_text(TRAINING[1])
    source = WithValidation(TextFiles([tmp_path / "copies"]), TextFiles([texts / "held_out"]))
    corpus = Corpus.open(
        make_corpus(source, tmp_path / "a", small.tokenizer, Selection(drop_duplicates=True))
    )
    assert texts_of(corpus, "training") == TRAINING[:2] and corpus.meta.skipped == {"duplicate": 1}
    assert texts_of(corpus, "validation") == HELD_OUT
    most = corpus.validation.num_tokens + corpus.training.document(0).size
    source = WithValidation(TextFiles([texts / "training"]), TextFiles([texts / "held_out"]))
    corpus = Corpus.open(make_corpus(source, tmp_path / "b", small.tokenizer, Selection(max_tokens=most)))
    assert texts_of(corpus, "training") == TRAINING[:1]
    with pytest.raises(UserError, match="no usable document for training"):
        make_corpus(source, tmp_path / "c", small.tokenizer, Selection(max_tokens=most - 20))
    one = corpus.training.document(0).size
    with pytest.raises(UserError, match=f"max_tokens: {one} leaves a single document, and one is held out"):
        make_corpus(
            TextFiles([texts / "training"]), tmp_path / "d", small.tokenizer, Selection(max_tokens=one)
        )


@pytest.mark.slow
def test_a_split_of_a_dataset_is_the_validation_split(small_folder, dataset, tmp_path):
    tokenizer = ["--tokenizer", small_folder / "tokenizer"]
    assert run("--dataset", dataset, *tokenizer, "--out", tmp_path / "a") == 0
    corpus = Corpus.open(tmp_path / "a")
    assert corpus.training.num_documents + corpus.validation.num_documents == len(TRAINING)
    assert corpus.meta.split["validation_fraction"] == 0.05, "local files: one share, whatever reads them"
    split = ["--validation_split", "validation"]
    assert run("--dataset", dataset, *split, *tokenizer, "--out", tmp_path / "b") == 0
    check(tmp_path / "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text T --validation_text T/00.txt", "00.txt' is in --text too"),
        ("--text T --validation_text H --validation_fraction 0.1", "and not both"),
        ("--text T --validation_split test", "validation_split: --validation_split does not go with --text"),
        ("--dataset D --validation_text H", "validation_text: --validation_text does not go with --dataset"),
        ("--dataset D --validation_split train", "'train' is what is trained on"),
        ("--dataset D --validation_split dev", "cannot be opened"),
        ("--dataset builtin --validation_split x", "does not go with --dataset builtin"),
    ],
)
def test_contradictions_are_one_line(texts, dataset, small_folder, tmp_path, capsys, arguments, message):
    places = {"T": texts / "training", "H": texts / "held_out", "D": dataset}
    filled = [
        str(places[argument[0]]) + argument[1:] if argument[0] in places else argument
        for argument in arguments.split()
    ]
    assert run(*filled, "--tokenizer", small_folder / "tokenizer", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
