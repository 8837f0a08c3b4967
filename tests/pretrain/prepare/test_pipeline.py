"""Preparation: complete, reproducible, safe against kills and against company."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.sources.files import TextFiles
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare import pipeline as module
from pretrain.prepare.output import SPLITS
from pretrain.prepare.pipeline import prepare, prepare_builtin
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_paths

ROOT = Path(__file__).parents[3]


def prepare_small(out: Path, progress=None) -> Path:
    return prepare(
        TextFiles(small_paths()),
        out,
        train_tokenizer=SMALL_VOCABULARY,
        validation_fraction=0.2,
        progress=progress,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def start(out: Path, extra: str = "") -> subprocess.Popen[str]:
    """A process that prepares the small corpus; *extra* is its progress callback's body, with ``line`` at
    hand."""
    code = f"""
import os, signal, sys
from pathlib import Path
from tests.pretrain.prepare.test_pipeline import prepare_small
def progress(report):
    line = str(report)
    print(line, flush=True)
    {extra or "pass"}
prepare_small(Path({str(out)!r}), progress)
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def texts_of(corpus: Corpus, split: str) -> list[str]:
    stream = getattr(corpus, split)
    documents = [stream.document(index) for index in range(stream.num_documents)]
    assert all(document[-1] == corpus.tokenizer.end_of_document for document in documents)
    assert sum((document == corpus.tokenizer.end_of_document).sum() for document in documents) == len(
        documents
    )
    return [corpus.tokenizer.decode(document) for document in documents]


def test_all_documents_are_there_once_and_on_one_side(small):
    training, validation = texts_of(small, "training"), texts_of(small, "validation")
    expected = [document.text for document in TextFiles(small_paths()).documents()]
    assert sorted(training + validation) == sorted(expected)
    assert not set(training) & set(validation)
    assert [text for text in expected if text in set(training)] == training, "in the order of the source"


def test_meta_says_what_is_there(small):
    for split in ("training", "validation"):
        texts = texts_of(small, split)
        assert small.meta[split] == {
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": getattr(small, split).num_tokens,
        }
    assert small.meta["tokenizer"]["vocab_size"] == small.tokenizer.vocab_size == SMALL_VOCABULARY
    assert small.meta["dtype"] == str(small.training.dtype) == "uint16"


def test_copies_of_a_document_fall_on_one_side(tmp_path, small):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"document {number % 20} " * 5)
    corpus = Corpus.open(
        prepare(TextFiles([tmp_path]), tmp_path / "out", tokenizer=small.tokenizer, validation_fraction=0.3)
    )
    training, validation = texts_of(corpus, "training"), texts_of(corpus, "validation")
    assert len(training) + len(validation) == 60
    assert not set(training) & set(validation)


def test_second_preparation_is_byte_identical(small_folder, tmp_path):
    again = prepare_small(tmp_path / "again")
    assert contents(again) == contents(small_folder)


def test_a_folder_with_the_same_corpus_is_left_alone_and_others_are_refused(small_folder, small, tmp_path):
    reports: list[object] = []
    assert prepare_small(small_folder, reports.append) == small_folder
    assert not reports
    with pytest.raises(UserError, match=r"holds another corpus \(differs in tokenizer\)"):
        prepare(TextFiles(small_paths()), small_folder, tokenizer=small.tokenizer, validation_fraction=0.2)
    with pytest.raises(UserError, match="differs in source, validation_fraction"):
        prepare(TextFiles(small_paths()[:5]), small_folder, train_tokenizer=SMALL_VOCABULARY)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    with pytest.raises(UserError, match="exists and is not a corpus"):
        prepare_small(tmp_path / "mine")
    with pytest.raises(UserError, match="exists and is not a corpus"):
        prepare_small(tmp_path / "mine" / "notes")
    assert contents(tmp_path / "mine") == {"notes": b"precious"}


@pytest.mark.parametrize("stage", ["reading", "training", "tokenizing"])
def test_kill_and_again(small_folder, tmp_path, stage):
    out = tmp_path / "out"
    process = start(out, f"if line.startswith({stage!r}): os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists() and list(tmp_path.glob(".out.partial-*")), "killed in the middle of the work"
    prepare_small(out)
    assert contents(out) == contents(small_folder)
    assert not list(tmp_path.glob(".out.partial-*"))


def test_several_processes_at_once_do_the_work_once(small_folder, tmp_path):
    out = tmp_path / "out"
    processes = [start(out, "import time; time.sleep(0.3)") for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("tokenizing" in output for output in outputs) == 1
    assert contents(out) == contents(small_folder)


def test_an_error_while_assembling_keeps_the_finished_parts_and_nothing_else(
    tmp_path, monkeypatch, small_folder
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pretrain.data.indexed.IndexedWriter.add_documents", full)
        with pytest.raises(OSError, match="No space left"):
            prepare_small(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", ".out.partial-parts"]
    monkeypatch.setattr("pretrain.prepare.parts._PartWriter.add", full)  # nothing is tokenized again
    assert contents(prepare_small(tmp_path / "out")) == contents(small_folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_progress_lines_count_up_to_everything(tmp_path, small):
    reports: list[module.Progress] = []
    prepare_small(tmp_path / "out", reports.append)
    assert [report.stage.split()[0] for report in reports] == ["reading", "training", "tokenizing"]
    last = reports[-1]
    assert last.bytes == last.total_bytes == sum(small.meta[split]["bytes"] for split in SPLITS)
    assert f"{last.documents:,} documents" in str(last) and f"{last.tokens:,} tokens" in str(last)


def test_gpt2_corpus(tmp_path, gpt2_folder):
    tokenizer = load_tokenizer(gpt2_folder)
    corpus = Corpus.open(prepare(TextFiles(small_paths()[:6]), tmp_path / "out", tokenizer=tokenizer))
    texts = texts_of(corpus, "training") + texts_of(corpus, "validation")
    assert sorted(texts) == sorted(document.text for document in TextFiles(small_paths()[:6]).documents())
    assert (corpus.tokenizer.name, corpus.tokenizer.end_of_document) == ("gpt2", 50256)


def test_bad_requests_are_refused(tmp_path, small):
    source = TextFiles(small_paths()[:6])
    for arguments in ({}, {"tokenizer": small.tokenizer, "train_tokenizer": 300}):
        with pytest.raises(UserError, match="either a tokenizer or a vocabulary size"):
            prepare(source, tmp_path / "out", **arguments)
    for size in (0, -5, 259, 10**7):
        with pytest.raises(UserError, match=f"train_tokenizer: {size} is out of range; valid: 260 to"):
            prepare(source, tmp_path / "out", train_tokenizer=size)
    with pytest.raises(UserError, match=r"validation_fraction: 1\.5"):
        prepare(source, tmp_path / "out", tokenizer=small.tokenizer, validation_fraction=1.5)
    with pytest.raises(UserError, match="at least two different documents"):
        prepare(TextFiles(small_paths()[:1]), tmp_path / "out", tokenizer=small.tokenizer)
    assert not (tmp_path / "out").exists()


def test_builtin_corpus_is_prepared_once(tmp_path, monkeypatch):
    folder = prepare_builtin(tmp_path, 600)
    started = time.monotonic()
    assert prepare_builtin(tmp_path, 600) == folder
    assert time.monotonic() - started < 1
    corpus = Corpus.open(folder)
    assert corpus.meta["source"]["python"] == platform.python_version()
    assert corpus.training.num_tokens > 5 * corpus.validation.num_tokens > 0
    # The name covers the settings, so that changing one makes another corpus instead of reusing this one.
    monkeypatch.setattr(module, "prepare", lambda source, out, **_: out)
    assert prepare_builtin(tmp_path, 601) != folder
    monkeypatch.setattr(module, "FORMAT_VERSION", 99)
    assert prepare_builtin(tmp_path, 600) != folder


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys, pretrain.prepare.command, pretrain.data.sequences, pretrain.data.loader\n"
        "print([name for name in ('torch', 'megatron', 'sentencepiece', 'tokenizers', 'transformers') "
        "if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []
