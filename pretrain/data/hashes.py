"""Compares a run's corpora with the hashes of their meta.json, in a thread during training."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from model.declared import to_dict
from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.meta import META_FILE, PREPARE_AGAIN, FileEntry
from pretrain.utils.files import file_entry, read_regular, write_atomically
from pretrain.utils.parsing import parse_json

REMEMBERED = ".verified.json"


class Closed(Exception):
    """Ends the reading of a file that need not be compared any more."""


def damage(path: Path, entry: FileEntry, each: Callable[[], object] = lambda: None) -> str | None:
    """What is wrong with a file of a corpus, all of which is read; None if it is what was written.

    Args:
        each: called for each chunk of the file; it may raise.
    """
    if file_entry(path, each) == to_dict(entry):
        return None
    return f"{str(path)!r} is not what was written (its hash differs from {META_FILE}); {PREPARE_AGAIN}"


class HashCheck:
    """Reads all files of *corpora* in a thread that does not keep the process alive.

    A file whose hash was right is not read again while its size, modification time and inode stay. That is
    remembered in the corpus folder, or in *fallback* where the folder cannot be written.
    """

    def __init__(self, corpora: Sequence[Corpus], fallback: Path) -> None:
        self.problem: str | None = None
        """What was found to be wrong so far."""
        self._corpora = {corpus.folder.resolve(): corpus for corpus in corpora if corpus.meta.files}
        self._fallback = fallback
        self._closed = False
        self._thread = threading.Thread(target=self._check_all, name="corpus hashes", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether something is still to be read."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Return when everything is read, or after *seconds*."""
        self._thread.join(seconds)

    def close(self) -> None:
        """Read no further, and end the thread."""
        self._closed = True
        self.wait()

    def _check_all(self) -> None:
        try:
            for folder, corpus in self._corpora.items():
                self._check(folder, corpus.meta.files or {})
                if self.problem:
                    return
        except Closed:
            return
        except Exception as error:  # any error must reach the main thread
            self.problem = f"{str(folder)!r} cannot be checked ({type(error).__name__}: {error}); restore it"

    def _check(self, folder: Path, files: dict[str, FileEntry]) -> None:
        own = xxhash.xxh3_64_hexdigest(
            f"{os.uname().nodename} {folder}".encode()
        )  # nodes may have their own copies
        place = self._fallback / f".verified-{own}.json"
        place = folder / REMEMBERED if os.access(folder, os.W_OK) else place
        remembered: dict[str, Any] = {}
        with suppress(OSError, UserError, TypeError, ValueError):
            remembered |= parse_json(read_regular(place, 1 << 20), "")
        found = dict(remembered)
        for name, entry in files.items():
            state = _state(folder / name, entry)
            if remembered.get(name) != state:
                self.problem = damage(folder / name, entry, self._go_on)
                if self.problem:
                    return
                if _state(folder / name, entry) == state:  # else it was changed while it was read
                    found[name] = state
                    with suppress(OSError):
                        write_atomically(place, json.dumps(found, indent=1))

    def _go_on(self) -> None:
        if self._closed:
            raise Closed


def files_seen(corpora: Sequence[Corpus]) -> list[str]:
    """What this rank sees of the corpora's files. Ranks that see the same read the same files: those of a
    node, or of all nodes where a network's file system holds them."""
    seen = []
    for corpus in corpora:
        for name, entry in (corpus.meta.files or {}).items():
            try:
                seen.append(_state(corpus.folder / name, entry))
            except OSError as error:  # named where the file is read
                seen.append(str(error))
    return seen


def _state(path: Path, entry: FileEntry) -> str:
    """What stays while a file does, with the hash that it must have."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {entry.xxh3_128}"
