"""Labelled files of every kind, written by hand, and the sequences that are cut from a labelled corpus."""

import gzip
import json

import numpy as np
import pytest

from model.errors import UserError
from pretrain.classification.corpus import Task, prepare_labelled
from pretrain.classification.examples import Examples, LabelledSequences, held_out_examples
from pretrain.classification.sources import Example, builtin_examples, class_names, read_examples
from pretrain.data.corpus import Corpus
from pretrain.prepare.sources.plain_files import BuiltinCorpus

# As in GLUE's SST-2: a header, no quoting, a space at the end of the sentence.
SST2 = "sentence\tlabel\nhide new secretions \t0\n\"it 's a charming \t1\nlend some \t1\n"


def write(path, content):
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"),
    [
        (
            "train.tsv",
            SST2,
            {},
            [("hide new secretions ", "0"), ("\"it 's a charming ", "1"), ("lend some ", "1")],
        ),
        ("x.tsv.gz", "label\ttext\tid\nyes\ta b\t7\n\nno\tc\t8\n", {}, [("a b", "yes"), ("c", "no")]),
        ("x.tsv", "s1\tgold\nab\tA\n", {"text_column": "s1", "label_column": "gold"}, [("ab", "A")]),
        (
            "x.jsonl",
            '{"text": "a\\tb", "label": 3}\n\n{"label": "x", "text": "c"}\n',
            {},
            [("a\tb", "3"), ("c", "x")],
        ),
        ("x.fasta", ">h/A|E|B\nACGT\nacgn\n\n>second C\nTTT\n", {}, [("ACGTACGN", "B"), ("TTT", "C")]),
        ("bom.tsv", "\ufeffsequence\tlabel\r\nAB\t1\r\n", {}, [("AB", "1")]),
    ],
)
def test_reads(tmp_path, name, content, columns, expected):
    assert read_examples(write(tmp_path / name, content), **columns) == [Example(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        (
            "x.tsv",
            "sentence\tlabel\na\t1\t2\n",
            {},
            "line 2 of .* has not the 2 fields that its first line names",
        ),
        ("x.tsv", "sentence\tlabel\na\n", {}, "line 2 of .* has not the 2 fields that its first line names"),
        (
            "x.tsv",
            "index\tsentence\n0\ta\n",
            {},
            "label_column: line 2 .* no 'label'; valid: .* index, sentence",
        ),
        ("x.tsv", "a\tb\n0\ta\n", {}, "text_column: line 2 of .* has no 'sentence'"),
        ("x.tsv", SST2, {"label_column": "Label"}, "has no 'Label'.*did you mean 'label'"),
        (
            "x.tsv",
            "sentence\tlabel\n \t1\n",
            {},
            "line 2 of .* has the text ' ' .empty.; give text that is not empty",
        ),
        ("x.tsv", "sentence\tlabel\na\t \n", {}, "line 2 of .* has the label ' '"),
        ("x.tsv", "sentence\tlabel\n", {}, "holds no example"),
        ("x.jsonl", '{"text": "a", "label": 1}\n[1]\n', {}, "line 2 of .* is not a JSON object"),
        ("x.jsonl", '{"text": "a", "label": 1.5}\n', {}, "line 1 of .* has the label 1.5"),
        ("x.jsonl", '{"text": "\\ud800", "label": 1}\n', {}, "line 1 of .* has the text"),
        ("x.fasta", "ACGT\n", {}, "does not begin with a FASTA header"),
        ("x.fasta", ">a A\nACGT\n>alone\nAC\n", {}, "line 3 of .* has the label ''"),
        ("x.fasta", ">a A\n>b B\nAC\n", {}, "line 1 of .* has the text ''"),
        (
            "x.fasta",
            ">a A\nAC\n",
            {"text_column": "x"},
            "text_column: line 1 of .* no 'x'; valid: .* sequence, label",
        ),
        ("x.tsv", "text\tlabel\ttext\na\tb\tc\n", {}, "has two columns 'text'"),
        ("x.jsonl", '{"text": "a", "label": "\\ud800"}\n', {}, "line 1 of .* has the label '.*ud800'"),
        ("x.jsonl", '{"text": "a", "label": "b\\u0000c"}\n', {}, "line 1 of .* has the label 'b.*x00c'"),
        ("x.jsonl", '{"text": "a\\u0000", "label": 1}\n', {}, r"line 1 of .* has the text .* \(binary\)"),
        ("x.jsonl", "[" * 100_000, {}, "line 1 of .* is nested deeper than"),
        ("x.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}", {}, "line 1 of .* has the label inf"),
        ("x.parquet", "", {}, "is of no known kind; give .tsv"),
        ("x.tsv.gz", None, {}, "cannot be read"),
        ("nowhere/x.tsv", None, {}, "x.tsv' does not exist; give a file of labelled examples"),
    ],
)
def test_refuses(tmp_path, name, content, columns, message):
    path = tmp_path / name
    if content is not None:
        write(path, content)
    elif path.parent.is_dir():
        path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=message):
        read_examples(path, **columns)


def test_integers_are_sorted_by_value_and_words_by_alphabet():
    assert class_names([Example("", label) for label in ("10", "2", "2", "-1")]) == ["-1", "2", "10"]
    equal = [Example("", label) for label in ("1", "01", "+1", "001", "2")]
    assert class_names(equal) == ["+1", "001", "01", "1", "2"]  # not by the seed of Python's hashes
    assert class_names([Example("", label) for label in ("b", "10", "a")]) == ["10", "a", "b"]
    with pytest.raises(UserError, match="the training examples have 1 different labels; give 2 to 1,000"):
        class_names([Example("", "a")])


def test_the_builtin_task_splits_by_file(tmp_path):
    for package, files in (("one", 12), ("two", 11), ("small", 9)):
        (tmp_path / package).mkdir()
        for number in range(files):
            lines = "".join(f"value_{package}_{number}_{line} = {line}\n" for line in range(60))
            (tmp_path / package / f"m{number}.py").write_text(lines)
    (tmp_path / "top.py").write_text("x = 1\n" * 500)
    splits = builtin_examples(BuiltinCorpus(tmp_path))
    assert {e.label for e in splits["training"]} == {e.label for e in splits["validation"]} == {"one", "two"}
    assert splits == builtin_examples(BuiltinCorpus(tmp_path))
    of_file = {name: {e.text.split("_")[1:3].__str__() for e in split} for name, split in splits.items()}
    assert len(of_file["training"]) == 10 + 9 and len(of_file["validation"]) == 2 + 2
    assert not of_file["training"] & of_file["validation"], "a file is in one split"
    for example in splits["training"]:
        assert 100 <= len(example.text) <= 400 and example.text.endswith("\n")
        assert all(line.startswith(f"value_{example.label}_") for line in example.text.splitlines())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Eleven training and five validation examples over the letters a to e, their tokens known by hand."""
    training = [Example("abcde"[: 1 + n % 5] * (1 + n // 5), "odd" if n % 2 else "even") for n in range(11)]
    validation = [Example("edcba"[: n + 1], "odd" if n % 2 else "even") for n in range(5)]
    task = Task(training, validation, {"name": "letters"}, {"by": "hand"})
    return Corpus.open(prepare_labelled(tmp_path_factory.mktemp("data") / "letters", task, None))


def test_rows(corpus):
    end, letters = corpus.tokenizer.end_of_document, corpus.tokenizer.encode("abcde")
    examples = Examples.open(corpus, "training")
    inputs, labels = examples.rows([2, 9], 6)  # "abc" and "abcdeabcde"
    assert inputs.tolist() == [[*letters[:3], end, end, end], [*letters, end]]
    assert labels.tolist() == [[-100, -100, -100, 0, -100, -100], [-100] * 5 + [1]]


def test_every_example_comes_once_an_epoch_in_an_order_of_the_seed(corpus):
    def order(seed, first, count):
        inputs, labels = LabelledSequences([(corpus, 1)], 12, seed).inputs_and_labels(first, count)
        return list(zip(map(tuple, inputs.tolist()), map(tuple, labels.tolist()), strict=True))

    examples = Examples.open(corpus, "training")
    each = [tuple(map(tuple, (part[0].tolist() for part in examples.rows([n], 12)))) for n in range(11)]
    first, second = order(1, 0, 11), order(1, 11, 11)
    assert sorted(first) == sorted(second) == sorted(each) and first != second
    assert order(1, 0, 3) + order(1, 3, 19) == first + second, "batches do not matter"
    assert order(2, 0, 11) != first


def test_held_out_examples_are_spread(corpus):
    inputs, labels = held_out_examples(corpus, 8, 2)
    all_inputs, all_labels = held_out_examples(corpus, 8, 99)
    assert len(all_inputs) == 5 and np.array_equal(inputs, all_inputs[[0, 2]])
    assert np.array_equal(labels, all_labels[[0, 2]])


def test_the_description_counts_examples_that_are_cut(corpus):
    described = LabelledSequences([(corpus, 1)], 6, 1).describe()
    # With the end: 2 to 6, then 3, 5, 7, 9, 11, and 4.
    assert described == ("letters: 2 classes, 11 training examples, 59 tokens, 3 of them cut to 6 tokens")


def test_a_corpus_without_labels_and_a_blend_are_refused(corpus, small_folder, tmp_path):
    with pytest.raises(
        UserError, match=r"has no labels; valid: one written by head-schedules prepare labelled"
    ):
        LabelledSequences([(Corpus.open(small_folder), 1)], 8, 1)
    with pytest.raises(UserError, match="data: a blend of 2 corpora cannot be classified"):
        LabelledSequences([(corpus, 1), (corpus, 1)], 8, 1)


@pytest.mark.parametrize("labels", [np.zeros(10, np.int32), np.full(11, 2, np.int32), None])
def test_labels_that_do_not_fit_are_refused(corpus, tmp_path, labels):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(corpus.folder, folder)
    if labels is None:
        (folder / "training_labels.npy").unlink()
    else:
        np.save(folder / "training_labels.npy", labels)
    with pytest.raises(
        UserError, match=r"training_labels.npy' .*delete its folder and prepare the corpus again"
    ):
        Examples.open(Corpus.open(folder), "training")


def test_meta_names_classes_and_counts(corpus):
    meta = json.loads((corpus.folder / "meta.json").read_text())
    assert meta["classes"] == ["even", "odd"]
    assert meta["training"]["of_each_class"] == [6, 5] and meta["validation"]["of_each_class"] == [3, 2]
