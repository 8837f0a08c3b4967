"""Text behind links and pipes is read; what has no end, or leads nowhere, is refused by its name."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare import command
from pretrain.prepare.sources.files import TextFiles
from tests.helpers.corpora import TEXTS, byte_level, contents
from tests.helpers.marks import slow
from tests.helpers.refusals import refusal, refused

LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "socket": (a_socket, "is a socket, not a file"),
    "loop": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "dangling": (lambda path: path.symlink_to("nothing"), "No such file"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_refused_by_its_name(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make, words = OTHERS[kind]
    for folder in ("texts/inner", "bytes", "bare", "pieces", "link"):
        Path(folder).mkdir(parents=True)
    Path("texts/first.txt").write_text("first")
    make(Path("texts/inner/other.txt"))
    for path in ("texts", "texts/inner/*", *(["texts/inner/other.txt"] if kind != "pipe" else [])):
        line = refusal(capsys, command.main, "--text", path, "--out", "out")
        assert words in line and "'texts/inner/other.txt'" in line
    byte_level(300).save("bytes/tokenizer.json")
    Path("bare/vocab.json").write_text('{"a": 0}')
    for name in (
        "bytes/tokenizer_config.json",
        "bare/merges.txt",
        "pieces/tokenizer.model",
        "link/tokenizer.json",
    ):
        make(Path(name))
        with refused(f"'{name}' cannot be read"):
            load_tokenizer(Path(name).parent)
    with refused("'pieces/tokenizer.model' cannot be read"):
        load_tokenizer("pieces/tokenizer.model")
    make(Path("examples.tsv"))
    if kind != "pipe":
        refusal(capsys, command.main, "labelled", "--train", "examples.tsv", "--out", "out")
    assert not Path("out").exists()


def test_links_to_files_and_folders_are_followed_once(tmp_path):
    blobs, texts = tmp_path / "blobs", tmp_path / "texts"
    (blobs / "more").mkdir(parents=True)
    texts.mkdir()
    (blobs / "0a1b").write_bytes(LINES)
    (blobs / "more" / "c.txt").write_text("one more")
    (texts / "a.jsonl").symlink_to("../blobs/0a1b")  # as in Hugging Face's cache
    (texts / "again.jsonl").symlink_to(texts / "a.jsonl")
    (texts / "linked").symlink_to(blobs / "more")
    (texts / "below").mkdir()
    (texts / "below" / "up").symlink_to("..")
    (blobs / "more" / "back").symlink_to(texts)
    names = [name for name, _ in TextFiles([texts]).files]
    assert names == ["a.jsonl", "linked/c.txt"]
    assert len(list(TextFiles([texts]).documents())) == len(TEXTS) + 1


def written(path: Path, data: bytes) -> Path:
    """A pipe that somebody writes *data* into, once."""
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(data,), daemon=True).start()
    return path


def test_a_pipe_makes_the_corpus_of_the_same_file(tmp_path, capsys):
    common = ["--train_tokenizer", "300", "--processes", "2"]
    (tmp_path / "held_out.txt").write_text("held out")

    def prepare(text: Path, held_out: Path, out: Path) -> dict[str, bytes]:
        paths = ["--text", text, "--validation_text", held_out, "--out", out]
        assert command.main([*map(str, paths), *common]) == 0
        return {name: data for name, data in contents(out).items() if name != "meta.json"}

    (tmp_path / "text.jsonl").write_bytes(LINES)
    expected = prepare(tmp_path / "text.jsonl", tmp_path / "held_out.txt", tmp_path / "file")
    for number, (name, data) in enumerate((("p.jsonl", LINES), ("p.jsonl.gz", gzip.compress(LINES)))):
        out = tmp_path / f"pipe{number}"
        for again in range(2):  # the second time the corpus is there
            folder = tmp_path / f"pipes{number}{again}"
            folder.mkdir()
            pipes = written(folder / name, data), written(folder / "v.txt", b"held out")
            assert prepare(*pipes, out) == expected
    assert not [path.name for path in tmp_path.iterdir() if ".pipes" in path.name]
    folder = tmp_path / "other"
    folder.mkdir()
    pipe = written(folder / "p.jsonl", LINES + b'{"text": "more"}')
    arguments = ["--text", pipe, "--validation_text", tmp_path / "held_out.txt", "--out", tmp_path / "pipe0"]
    assert "holds another corpus" in refusal(capsys, command.main, *arguments, *common)


@pytest.mark.slow
@pytest.mark.parametrize("is_pipe", [True, *slow([False])])
def test_standard_input_is_text(is_pipe, tmp_path):
    (tmp_path / "text.jsonl").write_bytes(LINES)
    options = "--format jsonl --train_tokenizer 300 --processes 1 --out out"
    line = [sys.executable, "-m", "pretrain.prepare", "--text", "/dev/stdin", *options.split()]
    given: dict[str, Any] = {"input": LINES} if is_pipe else {"stdin": (tmp_path / "text.jsonl").open("rb")}
    done = subprocess.run(line, **given, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and f"{len(TEXTS)} documents".encode() in done.stdout, done.stderr
    nothing = subprocess.run(
        [*line, "--shard", "0/2"], stdin=subprocess.DEVNULL, cwd=tmp_path, capture_output=True
    )
    assert nothing.returncode == 2 and b"'/dev/stdin' is a device, not a file" in nothing.stderr
