"""Preparation over processes, shards and kills: the output is that of one uninterrupted process."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare import parts
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import Preparation, make_corpus
from pretrain.prepare.progress import Progress
from pretrain.prepare.sources.files import TextFiles
from pretrain.utils.files import remove_leftovers
from tests.helpers.corpora import contents, texts_of
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_source

ROOT = Path(__file__).parents[3]
UNIT_BYTES, PART_BYTES = 40_000, 25_000


def make_texts(folder: Path, documents: int = 600) -> Path:
    """JSON Lines, gzip and plain files; every tenth document is there twice, every twentieth is bad."""
    folder.mkdir(parents=True)
    generator = random.Random(1)
    words = ["head", "layer", "schedule", "token", "the", "of", "é", "corpus", "\n", "    return x\n"]
    texts = [" ".join(generator.choices(words, k=generator.randint(1, 150))) for _ in range(documents)]
    texts = [text for number, text in enumerate(texts) for _ in range(1 + (number % 10 == 0))]
    lines = [
        json.dumps({"text": text}) + "\n" + ("" if number % 20 else "{bad\n")
        for number, text in enumerate(texts)
    ]
    half = len(lines) // 2
    (folder / "a.jsonl").write_text("".join(lines[:half]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[half:]).encode()))
    (folder / "c.txt").write_text("plain text " * 100)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return make_texts(tmp_path_factory.mktemp("scale") / "texts")


@pytest.fixture(scope="module")
def tokenizer_folder(small_folder) -> Path:
    return small_folder / "tokenizer"


def run(
    texts: Path, out: Path, tokenizer_folder: Path, max_tokens: int | None = None, **options: Any
) -> Path:
    selection = Selection(0.2, max_tokens=max_tokens)
    source = TextFiles([texts], unit_bytes=options.pop("unit_bytes", UNIT_BYTES))
    settings = {"part_bytes": PART_BYTES, **options}
    return Preparation(source, out, load_tokenizer(tokenizer_folder), selection, **settings).make()


@pytest.fixture(scope="module")
def expected(texts, tokenizer_folder, tmp_path_factory) -> dict[str, bytes]:
    """What one process writes in one part."""
    out = tmp_path_factory.mktemp("scale") / "expected"
    return contents(run(texts, out, tokenizer_folder, unit_bytes=None, part_bytes=10**9))


def test_output_does_not_depend_on_processes_units_or_parts(texts, tokenizer_folder, tmp_path, expected):
    for name, options in {
        "one": {},
        "two": {"processes": 2},
        "small": {"unit_bytes": 9000, "part_bytes": 4000},
    }.items():
        assert contents(run(texts, tmp_path / name, tokenizer_folder, **options)) == expected


def test_tokens_are_the_librarys_and_every_document_is_there_once(texts, tokenizer_folder, tmp_path):
    corpus = Corpus.open(run(texts, tmp_path / "out", tokenizer_folder))
    documents = [document.text for document in TextFiles([texts]).documents()]
    training, held_out = texts_of(corpus, "training"), set(texts_of(corpus, "validation"))
    assert sorted(training + texts_of(corpus, "validation")) == sorted(documents)
    assert training == [text for text in documents if text not in held_out]
    end = corpus.tokenizer.end_of_document
    ids = [[*corpus.tokenizer.encode(text), end] for text in training]
    assert corpus.training.read(0, corpus.training.num_tokens).tolist() == list(itertools.chain(*ids))
    assert corpus.meta.skipped == {"invalid_json": -(-(len(documents) - 1) // 20)}
    lengths = corpus.meta.document_lengths
    everything = sorted(len(corpus.tokenizer.encode(text)) + 1 for text in documents)
    assert (lengths.shortest, lengths.longest) == (everything[0], everything[-1])
    assert lengths.mean == pytest.approx(np.mean(everything), abs=0.05)
    assert lengths.p50 == everything[len(everything) // 2]


@contextlib.contextmanager
def parts_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the parts that are made meanwhile."""
    made: list[str] = []
    write = parts._write_part

    def noted(part: parts.Part, *rest: Any) -> Iterator[None]:
        made.append(part.prefix.name)
        return write(part, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "_write_part", noted)
        yield made


def start(texts: Path, out: Path, tokenizer_folder: Path, processes: int) -> subprocess.Popen[str]:
    """A process, leader of its own session, that prepares the corpus slowly enough to be hit."""
    code = f"""
from pathlib import Path
from tests.pretrain.prepare.test_preparation import run
if __name__ == "__main__":
    run(Path({str(texts)!r}), Path({str(out)!r}), Path({str(tokenizer_folder)!r}), processes={processes})
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL, text=True
    )


def markers(out: Path) -> set[str]:
    return {path.name for path in out.parent.glob(f".{out.name}.partial-parts/*-[0-9][0-9][0-9][0-9].json")}


def kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """SIGKILL to the first process alone: what its workers do then is part of the test."""
    deadline = time.monotonic() + 60
    while process.poll() is None and not ready() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait()


@pytest.mark.slow
def test_kill_at_random_moments_and_again(texts, tokenizer_folder, tmp_path, expected, monkeypatch):
    """After each kill the finished parts are as they were, and the end result is that of an
    undisturbed run."""
    out = tmp_path / "out"
    generator = random.Random(2)
    there: set[str] = set()
    for _ in range(2):
        target = len(there) + generator.randint(1, 3)
        process = start(texts, out, tokenizer_folder, 2)
        kill_when(process, lambda target=target: len(markers(out)) >= target)
        assert there <= markers(out) or out.exists()
        there = markers(out)
        deadline = time.monotonic() + 20
        while alive_in_group(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive_in_group(process.pid), "workers end with the first process"
        remove_leftovers(tmp_path / ".out.partial-parts")
        left = list(tmp_path.glob(".out.partial-parts/*-*-*"))
        assert not left, "what they had begun can be told, and removed"
    if not out.exists():
        there = markers(out)
        with parts_written(monkeypatch) as made:
            run(texts, out, tokenizer_folder)
        assert there and not there & {f"{name}.json" for name in made}, "nothing is tokenized twice"
    assert contents(out) == expected
    assert not list(tmp_path.glob(".out.partial*"))


def alive_in_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("stage", ["reading", "training", "tokenizing"])
def test_an_interruption_at_any_stage_costs_that_stage(small_folder, tmp_path, stage):
    def prepare_small(report: Callable[[str], object]) -> Path:
        return make_corpus(small_source(), tmp_path / "out", SMALL_VOCABULARY, Selection(0.2), report)

    def interrupt(line: str) -> None:
        if line.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_small(interrupt)
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.partial-*"))
    lines: list[str] = []
    assert contents(prepare_small(lines.append)) == contents(small_folder)
    assert any(line.startswith("training") for line in lines) == (stage != "tokenizing")
    assert [path.name for path in tmp_path.glob(".*")] == [".out.lock"]


def test_a_killed_worker_is_one_line_and_the_work_goes_on(
    texts, tokenizer_folder, tmp_path, expected, monkeypatch
):
    others = set(psutil.Process().children())  # what earlier tests have started and use again

    def kill_a_worker(_: object) -> None:
        for child in set(psutil.Process().children()) - others:
            with contextlib.suppress(psutil.Error):  # gone already: killed by an earlier report
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)

    monkeypatch.setattr("pretrain.prepare.tokenizing.LOOK_SECONDS", 0)
    monkeypatch.setattr("pretrain.prepare.progress.REPORT_SECONDS", 0)
    with pytest.raises(UserError, match=r"processes: one of 2 was killed .* the same command"):
        run(texts, tmp_path / "out", tokenizer_folder, processes=2, report=kill_a_worker)
    assert contents(run(texts, tmp_path / "out", tokenizer_folder)) == expected


def test_errors_of_workers_arrive(tokenizer_folder, tmp_path):
    folder = make_texts(tmp_path / "texts", 50)
    data = (folder / "b.jsonl.gz").read_bytes()
    (folder / "b.jsonl.gz").write_bytes(data[:-20])
    with pytest.raises(UserError, match=r"b\.jsonl\.gz' is truncated or damaged"):
        run(folder, tmp_path / "out", tokenizer_folder, processes=2)
    (folder / "b.jsonl.gz").write_bytes(data)  # replaced: what was finished is used
    assert run(folder, tmp_path / "out", tokenizer_folder).is_dir()


def test_an_error_while_assembling_keeps_finished_parts_and_damaged_ones_are_made_again(
    texts, tokenizer_folder, tmp_path, expected, monkeypatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("pretrain.data.indexed.IndexedWriter.add_documents", full)
        with pytest.raises(OSError, match="No space"):
            run(texts, out, tokenizer_folder)
        assert {path.name for path in tmp_path.iterdir()} == {".out.lock", ".out.partial-parts"}
    stored = [part for part in sorted((tmp_path / ".out.partial-parts").glob("*.bin")) if part.stat().st_size]
    stored[0].write_bytes(stored[0].read_bytes()[:-2])
    stored[1].unlink()
    stored[2].with_suffix(".json").write_text("{")
    with parts_written(monkeypatch) as made:
        assert contents(run(texts, out, tokenizer_folder)) == expected
    # Parts behind a damaged one of the same unit are made again, too.
    units = {part.name.rpartition("-")[0] for part in stored[:3]}
    assert {name.rpartition("-")[0] for name in made} == units


def test_the_last_share_makes_the_folder(texts, tokenizer_folder, tmp_path, expected):
    source, tokenizer = TextFiles([texts], unit_bytes=UNIT_BYTES), load_tokenizer(tokenizer_folder)
    preparation = Preparation(source, tmp_path / "out", tokenizer, Selection(0.2), part_bytes=PART_BYTES)
    assert [preparation.make_share(number, 3) for number in (2, 0, 2)] == [None] * 3
    assert preparation.make_share(1, 3) == tmp_path / "out" and contents(tmp_path / "out") == expected
    assert preparation.make_share(1, 3) == tmp_path / "out", "again: its work is done"


def test_progress_has_figures_and_time_left(texts, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.prepare.tokenizing.LOOK_SECONDS", 0)
    monkeypatch.setattr("pretrain.prepare.progress.REPORT_SECONDS", 0)
    lines: list[str] = []
    run(texts, tmp_path / "out", tokenizer_folder, report=lines.append)
    tokens = [
        int(re.search(r"([\d,]+) tokens", line)[1].replace(",", "")) for line in lines if "tokens" in line
    ]
    assert len(tokens) > 5 and tokens == sorted(tokens)
    assert re.search(r"\d documents, .* of .* MB, .* tokens, .* MB/s, \d+s left$", lines[len(lines) // 2])
    corpus = Corpus.open(tmp_path / "out")
    entries = (corpus.meta.training, corpus.meta.validation)
    documents, size = sum(entry.documents for entry in entries), sum(entry.bytes for entry in entries) / 1e6
    assert lines[-1].startswith(f"tokenizing: {documents:,} documents, {size:.1f} of {size:.1f} MB")


def test_the_rate_leaves_out_what_an_earlier_process_had_done():
    now, lines = [0.0], list[str]()
    progress = Progress("tokenizing", lines.append, before=40_000_000, clock=lambda: now[0])
    for now[0], megabytes in ((5.0, 40), (10.0, 60)):
        progress(5, megabytes * 10**6, 7, 100_000_000)
    assert lines[0] == "tokenizing: 5 documents, 40.0 of 100.0 MB, 7 tokens, 0.0 MB/s"
    assert lines[1] == "tokenizing: 5 documents, 60.0 of 100.0 MB, 7 tokens, 2.0 MB/s, 20s left"
    assert progress.is_due() and not progress.is_due(), "every ten seconds"


@settings(max_examples=20, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    unit_bytes=st.integers(20, 400),
    drop_duplicates=st.booleans(),
    fraction=st.floats(0.05, 0.9),
    max_tokens=st.none() | st.integers(1, 200),
)
def test_selection_against_a_plain_loop(
    tmp_path_factory, tokenizer_folder, numbers, unit_bytes, drop_duplicates, fraction, max_tokens
):
    folder = tmp_path_factory.mktemp("selection")
    documents = [f"number {number} " + "x" * number for number in numbers]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenizer = load_tokenizer(tokenizer_folder)
    kept: list[str] = []
    looked_at = total = 0
    for text in documents:
        size = len(tokenizer.encode(text)) + 1
        if drop_duplicates and text in kept:
            looked_at += 1
            continue
        if max_tokens is not None and total + size > max_tokens:
            break
        kept.append(text)
        total += size
        looked_at += 1
    selection = Selection(fraction, drop_duplicates, max_tokens)
    source = TextFiles([folder / "a.jsonl"], unit_bytes=unit_bytes)
    if len(set(kept)) < 2:
        with pytest.raises(UserError):
            Preparation(source, folder / "out", tokenizer, selection, part_bytes=100).make()
        return
    corpus = Corpus.open(Preparation(source, folder / "out", tokenizer, selection, part_bytes=100).make())
    training, held_out = texts_of(corpus, "training"), texts_of(corpus, "validation")
    assert not set(training) & set(held_out)
    assert training == [text for text in kept if text not in held_out]
    assert held_out == [text for text in kept if text in set(held_out)] and held_out
    assert corpus.meta.skipped.get("duplicate", 0) == looked_at - len(kept)


@pytest.mark.slow
def test_the_cap_does_not_depend_on_processes_and_spares_work(texts, tokenizer_folder, tmp_path, monkeypatch):
    # The first unit alone reaches 4,000 tokens; 33,000 take several, which processes finish in any order.
    for cap, processes in ((4000, 2), (33_000, 3)):
        first, other = (
            contents(run(texts, tmp_path / f"{cap}-{count}", tokenizer_folder, cap, processes=count))
            for count in (1, processes)
        )
        assert other == first
        corpus = Corpus.open(tmp_path / f"{cap}-1")
        assert cap - 500 < corpus.training.num_tokens + corpus.validation.num_tokens <= cap
    with parts_written(monkeypatch) as made:
        run(texts, tmp_path / "again", tokenizer_folder, 4000)
    assert len(made) == 1, "one part has 14,000 tokens"
    with pytest.raises(UserError, match="max_tokens: the first document alone has more than 2 tokens"):
        run(texts, tmp_path / "none", tokenizer_folder, 2)
