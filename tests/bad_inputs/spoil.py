"""Makes the files that cases read, and spoils one of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import yaml

from tests.bad_inputs.cases import Case

COPIED_BYTES = 1 << 16
HUGE_BYTES = 1 << 34  # sparse
TEXT_BYTES = 1 << 28  # of a text, which is read to its end
STREAMED = ("rows.jsonl", "labels.jsonl")


def copy_world(world: Path, target: Path) -> None:
    """A copy to spoil. Large files are links to those of *world*: nothing here or in the project writes into
    one in place."""

    def copy(source: str, to: str) -> str:
        if Path(source).stat().st_size > COPIED_BYTES:
            os.link(source, to)
        else:
            shutil.copy2(source, to)
        return to

    shutil.copytree(world, target, copy_function=copy)
    bad = target / "bad"
    (bad / "folder").mkdir(parents=True)
    os.mkfifo(bad / "fifo")
    (bad / "loop").symlink_to("loop")
    (bad / "dangling").symlink_to("nowhere")
    (bad / "empty").touch()
    (bad / "file").write_text("text\n")
    (bad / "garbage").write_bytes(bytes(range(256)) * 40)


def spoil(folder: Path, case: Case) -> None:
    """Spoil the case's file in a copy of the world."""
    assert case.file
    path = folder / case.file
    old = path.read_bytes() if path.is_file() else b"{}"
    if case.kind.startswith("leaf"):
        path.write_text(_with_leaf(path, case.value), encoding="utf-8", errors="surrogatepass")
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    links = {"device": "/dev/zero", "full": "/dev/full", "loop": path.name, "dangling": "nowhere"}
    contents = {
        "truncated": old[: len(old) // 2],
        "garbage": os.urandom(2000),
        "empty": b"",
        "nested": b"[" * 100_000,
        "deep yaml": b"a: " + b"{b: " * 100_000,
        "utf16": old[:COPIED_BYTES].decode("utf-8", "replace").encode("utf-16"),
        "list": b"[1, 2, 3]",
        "text": b"just a line\n",
        "zeros": bytes(len(old)),
        "appended": old + b"\n\x00\xff}",
        "byte": old[: len(old) // 3] + bytes([old[len(old) // 3] ^ 0x55]) + old[len(old) // 3 + 1 :],
    }
    if case.kind == "folder":
        path.mkdir()
    elif case.kind == "fifo":
        os.mkfifo(path)
    elif case.kind == "socket":
        os.chdir(path.parent)  # their addresses are short
        socket.socket(socket.AF_UNIX).bind(path.name)
    elif case.kind in links:
        path.symlink_to(links[case.kind])
    elif case.kind == "huge":
        path.write_bytes(old)
        os.truncate(path, TEXT_BYTES if path.name in STREAMED else HUGE_BYTES)
    elif case.kind != "missing":
        path.write_bytes(contents[case.kind])


def _with_leaf(path: Path, value: Any) -> str:
    """A JSON or YAML file's text with one of its values replaced."""
    number, leaf = value
    text = path.read_text()
    lines = path.suffix == ".jsonl"
    parsed = (
        [json.loads(line) for line in text.splitlines()]
        if lines
        else json.loads(text)
        if path.suffix == ".json"
        else yaml.safe_load(text)
    )
    places: list[tuple[Any, Any]] = []
    pending = [parsed]
    while pending:
        item = pending.pop()
        keys = list(item) if isinstance(item, dict) else range(min(len(item), 3)) if item else ()
        for key in keys:
            places.append((item, key))
            if isinstance(item[key], dict | list):
                pending.append(item[key])
    holder, key = places[number * 7 % len(places)]
    holder[key] = leaf
    if lines:
        return "".join(json.dumps(row) + "\n" for row in parsed)
    return json.dumps(parsed, indent=1) if path.suffix == ".json" else yaml.safe_dump(parsed)
