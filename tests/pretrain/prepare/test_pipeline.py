"""Preparation over processes, shards and kills: the output is that of one uninterrupted process, as in
memory."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.making.assemble import Selection
from pretrain.data.making.make import make_corpus
from pretrain.data.making.progress import Progress
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare import parts as shards
from pretrain.prepare.pipeline import merge, prepare, prepare_share
from pretrain.prepare.sources.files import TextFiles
from pretrain.prepare.workers import Tokenizing, _leave_alone
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
    source = TextFiles([texts], unit_bytes=UNIT_BYTES)
    return prepare(source, out, load_tokenizer(tokenizer_folder), selection, part_bytes=PART_BYTES, **options)


@pytest.fixture(scope="module")
def expected(texts, tokenizer_folder, tmp_path_factory) -> dict[str, bytes]:
    """What one process writes in memory."""
    out = tmp_path_factory.mktemp("scale") / "expected"
    return contents(make_corpus(TextFiles([texts]), out, load_tokenizer(tokenizer_folder), Selection(0.2)))


def test_output_does_not_depend_on_processes_units_or_parts(texts, tokenizer_folder, tmp_path, expected):
    assert contents(run(texts, tmp_path / "one", tokenizer_folder)) == expected
    assert contents(run(texts, tmp_path / "two", tokenizer_folder, processes=2)) == expected
    tokenizer = load_tokenizer(tokenizer_folder)
    for name, unit_bytes, part_bytes in (("whole", None, 10**9), ("small", 9000, 4000)):
        source = TextFiles([texts], unit_bytes=unit_bytes)
        out = prepare(source, tmp_path / name, tokenizer, Selection(0.2), part_bytes=part_bytes)
        assert contents(out) == expected


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
    everything = [len(corpus.tokenizer.encode(text)) + 1 for text in documents]
    assert lengths["longest"] == max(everything) and lengths["shortest"] == min(everything)
    assert lengths["mean"] == pytest.approx(np.mean(everything), abs=0.05)
    assert sum(lengths["histogram"]["documents"]) == len(everything)
    # A percentile is the upper end of a bin: at most 2^(1/8) - 1 = 9 % and rounding above the true one.
    assert np.percentile(everything, 50) - 1 <= lengths["p50"] <= np.percentile(everything, 50) * 1.1 + 1


def start(texts: Path, out: Path, tokenizer_folder: Path, processes: int) -> subprocess.Popen[str]:
    """A process, leader of its own session, that prepares the corpus slowly enough to be hit."""
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from tests.pretrain.prepare.test_pipeline import run
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


@pytest.mark.parametrize("processes", [1, 2])
def test_kill_at_random_moments_and_again(
    texts, tokenizer_folder, tmp_path, expected, processes, monkeypatch
):
    """After each kill the finished parts are as they were, and the end result is that of an
    undisturbed run."""
    out = tmp_path / "out"
    generator = random.Random(processes)
    there: set[str] = set()
    for _ in range(2):
        target = len(there) + generator.randint(1, 3)
        pause = generator.random() * 0.02
        process = start(texts, out, tokenizer_folder, processes)
        group = process.pid
        kill_when(process, lambda target=target: len(markers(out)) >= target)
        time.sleep(pause)
        assert there <= markers(out) or out.exists()
        there = markers(out)
        deadline = time.monotonic() + 20
        while alive_in_group(group) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive_in_group(group), "workers end with the first process"
        remove_leftovers(tmp_path / ".out.partial-parts")
        left = list(tmp_path.glob(".out.partial-parts/*-*-*"))
        assert not left, "what they had begun can be told, and removed"
    if not out.exists():
        tokenized = []
        whole = shards._PartWriter.finish

        def finish(writer, records, last):
            tokenized.append(f"{writer.prefix.name}.json")
            whole(writer, records, last)

        monkeypatch.setattr(shards._PartWriter, "finish", finish)
        there = markers(out)
        run(texts, out, tokenizer_folder)
        assert there and not there & set(tokenized), "nothing is tokenized twice"
    assert contents(out) == expected
    assert not list(tmp_path.glob(".out.partial*"))


def test_a_worker_goes_on_only_while_the_main_process_lives(texts, tokenizer_folder, tmp_path, monkeypatch):
    """Its units are many and its main process is gone: it leaves after a batch of documents."""
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    source, tokenizer = TextFiles([texts], unit_bytes=UNIT_BYTES), load_tokenizer(tokenizer_folder)
    how = Tokenizing(source, tmp_path, tokenizer_folder, np.dtype(np.uint16), PART_BYTES, None)
    with pytest.raises(SystemExit):
        how.tokenize((source.units()[0], "key"), tokenizer, _leave_alone)
    assert not list(tmp_path.iterdir()), "and takes its unfinished part along"


def alive_in_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_kills_at_random_times(texts, tokenizer_folder, tmp_path, expected, seed):
    generator = random.Random(seed)
    out = tmp_path / "out"
    for _ in range(4):
        process = start(texts, out, tokenizer_folder, generator.randint(1, 3))
        time.sleep(generator.random() * 3)
        os.killpg(process.pid, signal.SIGKILL)  # workers too: a machine that loses its power
        process.wait()
    assert contents(run(texts, out, tokenizer_folder)) == expected


@pytest.mark.parametrize("stage", ["reading", "training", "tokenizing"])
def test_an_interruption_at_any_stage_costs_that_stage(small_folder, tmp_path, stage, monkeypatch):
    def prepare_small(report: Callable[[Progress], object]) -> Path:
        return prepare(small_source(), tmp_path / "out", SMALL_VOCABULARY, Selection(0.2), report=report)

    def interrupt(progress: Progress) -> None:
        if progress.stage.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_small(interrupt)
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.partial-*"))
    reports: list[Progress] = []
    assert contents(prepare_small(reports.append)) == contents(small_folder)
    assert any(report.stage.startswith("training") for report in reports) == (stage != "tokenizing")
    assert [path.name for path in tmp_path.glob(".*")] == [".out.lock"]


def test_a_killed_worker_is_one_line_and_the_work_goes_on(
    texts, tokenizer_folder, tmp_path, expected, monkeypatch
):
    def kill_a_worker(_: object) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # gone already: killed by an earlier report
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)

    monkeypatch.setattr("pretrain.prepare.tracker.REPORT_SECONDS", 0)
    message = r"processes: one of 2 died \(killed by SIGKILL\); .* the same command"
    with pytest.raises(UserError, match=message):
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
    parts = sorted((tmp_path / ".out.partial-parts").glob("*.bin"))
    parts = [part for part in parts if part.stat().st_size]
    parts[0].write_bytes(parts[0].read_bytes()[:-2])
    parts[1].unlink()
    parts[2].with_suffix(".json").write_text("{")
    made = []
    whole = shards._PartWriter.finish
    monkeypatch.setattr(
        shards._PartWriter, "finish", lambda writer, *rest: (made.append(writer.prefix), whole(writer, *rest))
    )
    assert contents(run(texts, out, tokenizer_folder)) == expected
    # Parts behind a damaged one of the same unit are made again, too.
    units = {part.name.rpartition("-")[0] for part in parts[:3]}
    assert {path.name.rpartition("-")[0] for path in made} == units


def test_shares_and_merge(texts, tokenizer_folder, tmp_path, expected):
    source = TextFiles([texts], unit_bytes=UNIT_BYTES)
    tokenizer = load_tokenizer(tokenizer_folder)

    def share(number: int, count: int = 3) -> int:
        place = (number, count)
        return prepare_share(
            source, tmp_path / "out", place, tokenizer, Selection(0.2), part_bytes=PART_BYTES
        )

    with pytest.raises(UserError, match="merge: nothing is prepared"):
        merge(tmp_path / "out")
    assert share(2) + share(0) == len(source.units()) - len(source.units()[1::3])
    with pytest.raises(UserError, match=r"merge: \d+ of \d+ units .* are not tokenized \(numbers 1, 4"):
        merge(tmp_path / "out")
    share(1)
    assert contents(merge(tmp_path / "out")) == expected
    assert merge(tmp_path / "out") == tmp_path / "out", "merging again finds its work done"
    assert share(1) == 0
    for wrong in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(UserError, match=r"shard: .* is out of range"):
            share(*wrong)


def test_progress_has_figures_and_time_left(texts, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.prepare.tracker.REPORT_SECONDS", 0)
    reports: list[Progress] = []
    run(texts, tmp_path / "out", tokenizer_folder, report=reports.append)
    *before, last = reports
    assert last.done and not any(report.done for report in before)
    assert [report.tokens for report in reports] == sorted(report.tokens for report in reports)
    middle = before[len(before) // 2]
    assert middle.seconds_left is not None and middle.seconds_left > 0 and middle.total_bytes > middle.bytes
    assert "MB/s" in str(middle) and " left" in str(middle) and " left" not in str(last)


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    unit_bytes=st.integers(20, 400),
    drop_duplicates=st.booleans(),
    validation=st.integers(1, 6) | st.floats(0.05, 0.9),
    max_tokens=st.none() | st.integers(1, 200),
)
def test_selection_against_a_plain_loop(
    tmp_path_factory, tokenizer_folder, numbers, unit_bytes, drop_duplicates, validation, max_tokens
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
    by_count = isinstance(validation, int)
    held = {"validation_documents" if by_count else "validation_fraction": validation}
    selection = Selection(**held, max_tokens=max_tokens, drop_duplicates=drop_duplicates)
    source = TextFiles([folder / "a.jsonl"], unit_bytes=unit_bytes)
    if len(set(kept)) < 2 or (by_count and len(set(kept)) <= validation):
        with pytest.raises(UserError):
            prepare(source, folder / "out", tokenizer, selection, part_bytes=100)
        return
    corpus = Corpus.open(prepare(source, folder / "out", tokenizer, selection, part_bytes=100))
    training, held_out = texts_of(corpus, "training"), texts_of(corpus, "validation")
    assert not set(training) & set(held_out)
    assert training == [text for text in kept if text not in held_out]
    assert held_out == [text for text in kept if text in set(held_out)] and held_out
    assert corpus.meta.skipped.get("duplicate", 0) == looked_at - len(kept)
    if by_count:
        assert len(set(held_out)) == validation


def test_the_cap_does_not_depend_on_processes_and_spares_work(texts, tokenizer_folder, tmp_path):
    # The first unit alone reaches 4,000 tokens; 33,000 take several, which processes finish in any order.
    for cap in (4000, 33_000):
        first, *others = (
            contents(run(texts, tmp_path / f"{cap}-{count}", tokenizer_folder, cap, processes=count))
            for count in (1, 2, 3)
        )
        assert others == [first, first]
        corpus = Corpus.open(tmp_path / f"{cap}-1")
        assert cap - 500 < corpus.training.num_tokens + corpus.validation.num_tokens <= cap
    reports: list[Progress] = []
    run(texts, tmp_path / "again", tokenizer_folder, 4000, report=reports.append)
    assert reports[-1].tokens < 20_000, "one part has 14,000 tokens, the whole source 350,000"
    with pytest.raises(UserError, match="max_tokens: the first document alone has more than 2 tokens"):
        run(texts, tmp_path / "none", tokenizer_folder, 2)


def test_more_documents_than_there_are_cannot_be_held_out(texts, tokenizer_folder, tmp_path):
    tokenizer, selection = load_tokenizer(tokenizer_folder), Selection(validation_documents=10**6)
    with pytest.raises(UserError, match=r"validation_documents: 1000000 of only \d+ different documents"):
        prepare(TextFiles([texts]), tmp_path / "out", tokenizer, selection)
    assert not (tmp_path / "out").exists()


def test_the_histogram_is_drawn_on_request_and_always_the_same(texts, tokenizer_folder, tmp_path):
    one, two = (run(texts, tmp_path / name, tokenizer_folder, draw=True) for name in ("one", "two"))
    image = (one / "document_lengths.png").read_bytes()
    assert image.startswith(b"\x89PNG") and image == (two / "document_lengths.png").read_bytes()
