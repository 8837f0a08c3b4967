"""Corpora of text files: complete, reproducible, safe against company and errors."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.meta import SplitEntry
from pretrain.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from pretrain.prepare import builtin, make
from pretrain.prepare.assemble import SPLITS, Selection
from pretrain.prepare.builtin import prepare_builtin
from pretrain.prepare.make import describe_uneven_split, make_corpus
from pretrain.prepare.sources.files import TextFiles
from pretrain.prepare.sources.plain_files import BuiltinCorpus, PlainFiles
from tests.helpers.corpora import TEXTS, byte_level, contents, texts_of
from tests.helpers.launch import ROOT
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_source


def make_small(out: Path, report=lambda _: None) -> Path:
    return make_corpus(small_source(), out, SMALL_VOCABULARY, Selection(0.2), report)


def test_meta_says_what_is_there(small):
    for split in SPLITS:
        texts, entry = texts_of(small, split), getattr(small.meta, split)
        size = sum(len(text.encode()) for text in texts)
        assert (entry.documents, entry.bytes) == (len(texts), size)
        assert entry.tokens == getattr(small, split).num_tokens
    assert small.meta.tokenizer.vocab_size == small.tokenizer.vocab_size == SMALL_VOCABULARY
    assert small.meta.dtype == str(small.training.dtype) == "uint16"


def test_a_folder_with_the_same_corpus_is_left_alone_and_others_are_refused(small_folder, small, tmp_path):
    reports: list[str] = []
    assert contents(make_small(tmp_path / "again")) == contents(small_folder)
    assert make_small(small_folder, reports.append) == small_folder
    assert not reports
    with pytest.raises(UserError, match=r"holds another corpus \(differs in tokenizer\)"):
        make_corpus(small_source(), small_folder, small.tokenizer, Selection(0.2))
    with pytest.raises(UserError, match="differs in source, validation_fraction"):
        make_corpus(small_source(5), small_folder, SMALL_VOCABULARY)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    for place in (tmp_path / "mine", tmp_path / "mine" / "notes"):
        with pytest.raises(UserError, match="exists and is not a corpus"):
            make_small(place)
    assert contents(tmp_path / "mine") == {"notes": b"precious"}


def test_files_of_equal_name_size_and_time_are_all_read(small, tmp_path):
    files = []
    for name in "ab":
        path = tmp_path / name / "part.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"text": f"text {n} of {name}"}) + "\n" for n in range(20)))
        os.utime(path, ns=(10**18, 10**18))
        files.append(path)
    made = Corpus.open(make_corpus(TextFiles(files), tmp_path / "out", small.tokenizer, Selection(0.2)))
    found = sorted(text for split in SPLITS for text in texts_of(made, split))
    assert found == sorted(f"text {n} of {name}" for n in range(20) for name in "ab")


@pytest.mark.slow
def test_several_processes_at_once_do_the_work_once(small_folder, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from tests.pretrain.prepare.test_make import "
        "make_small\nmake_small(Path(sys.argv[1]), lambda report: (print(report, flush=True), "
        "time.sleep(0.3)))"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "out")]
    processes = [subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("tokenizing" in output for output in outputs) == 1
    assert contents(tmp_path / "out") == contents(small_folder)


def test_bad_requests_are_refused(tmp_path, small):
    for size in (0, -5, 259, 10**7):
        with pytest.raises(UserError, match=f"train_tokenizer: {size} is not valid; give 260 to 1000000"):
            make_corpus(small_source(6), tmp_path / "out", size)
    with pytest.raises(UserError, match="at least two different documents"):
        make_corpus(small_source(1), tmp_path / "out", small.tokenizer)
    assert not (tmp_path / "out").exists()


def test_builtin_corpus_is_prepared_once(tmp_path, monkeypatch):
    email = BuiltinCorpus(Path(sysconfig.get_path("stdlib")) / "email")  # a part of it is enough
    monkeypatch.setattr(builtin, "BuiltinCorpus", lambda: email)
    folder = prepare_builtin(tmp_path, 600)
    started = time.monotonic()
    assert prepare_builtin(tmp_path, 600) == folder
    assert time.monotonic() - started < 1
    corpus = Corpus.open(folder)
    assert corpus.meta.source["python"] == platform.python_version()
    assert corpus.training.num_tokens > 5 * corpus.validation.num_tokens > 0
    # The name covers the settings, so that changing one makes another corpus instead of reusing this one.
    monkeypatch.setattr(make, "make_corpus", lambda source, out, *_, **__: out)
    assert prepare_builtin(tmp_path, 601) != folder
    monkeypatch.setattr(builtin, "FORMAT_VERSION", 99)
    assert prepare_builtin(tmp_path, 600) != folder


@pytest.mark.parametrize("module", ["prepare.make, pretrain.data.sequences", "prepare.command"])
def test_nothing_heavy_is_imported_before_it_is_needed(module):
    heavy = {"torch", "megatron", "sentencepiece", "tokenizers", "transformers", "datasets", "matplotlib"}
    line = [sys.executable, "-c", f"import sys, pretrain.{module}; print(*{heavy} & sys.modules.keys())"]
    assert subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "\n"


def test_a_share_far_from_the_requested_one_is_reported():
    """5 % of 60 documents is three; one of them alone may be held out."""
    training, few, many = SplitEntry(59, None, 9930), SplitEntry(1, None, 70), SplitEntry(1, None, 1200)
    expected = (
        "0.7% of the tokens (1 of 60 documents) are held out for validation; 5.0% were requested. With few"
    )
    assert describe_uneven_split(0.05, training, few).startswith(expected)
    assert "10.8% of the tokens (" in describe_uneven_split(0.05, training, many)
    assert not describe_uneven_split(0.05, training, SplitEntry(3, None, 600))


def test_a_small_corpus_reports_its_split(tmp_path, small):
    reports: list[str] = []
    corpus = Corpus.open(
        make_corpus(small_source(4), tmp_path / "out", small.tokenizer, Selection(0.001), reports.append)
    )
    assert corpus.meta.validation.documents == 1
    assert any("(1 of 4 documents)" in line and "--validation_text PATH" in line for line in reports)


@pytest.mark.parametrize("trained", [True, False])
def test_control_strings_in_documents_are_counted(trained, tmp_path):
    texts = [
        f"{text} {more}"
        for text, more in zip(TEXTS, ["<unk>", "x", "<|endoftext|> <unk>", *"abc"], strict=False)
    ]
    files = []
    for number, text in enumerate(texts):
        files.append((f"{number}.txt", tmp_path / f"{number}.txt"))
        files[-1][1].write_text(text)
    tokenizer = SentencePieceTokenizer.train(TEXTS, 290)
    if not trained:
        byte_level(300).save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path)
    reports: list[str] = []
    make_corpus(PlainFiles("text", files), tmp_path / "corpus", tokenizer, Selection(0.5), reports.append)
    found, shown = ("2 of 6", "<unk>, <|endoftext|>") if trained else ("1 of 6", "<|endoftext|>")
    became = "they are kept as text" if trained else "they became these tokens"
    line = (
        f"{found} documents that were tokenized contain control strings of the tokenizer ({shown}); {became}"
    )
    assert reports[-1].replace("<|endoftext|>, <unk>", "<unk>, <|endoftext|>") == line
