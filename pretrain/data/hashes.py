"""Compares a run's corpora with the hashes of their meta.json, in a thread beside the training."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from model.declared import to_plain
from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.meta import META_FILE, FileEntry
from pretrain.utils.files import file_entry, read_regular, write_atomically
from pretrain.utils.parsing import parse_json

REMEMBERED = ".verified.json"
_MOST_BYTES = 1 << 20  # of a file of remembered hashes


def damage(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file of a corpus, all of which is read; None if it is what was written."""
    try:
        if file_entry(path) == to_plain(entry):
            return None
    except OSError as error:
        return f"{str(path)!r} cannot be read ({error.strerror}); restore it, or prepare the corpus again"
    return (
        f"{str(path)!r} is not what was written (its hash differs from {META_FILE}); prepare the corpus again"
    )


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
        self._thread = threading.Thread(target=self._check_all, name="corpus hashes", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether something is still to be read."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Return when everything is read, or after *seconds*."""
        self._thread.join(seconds)

    def _check_all(self) -> None:
        try:
            for folder, corpus in self._corpora.items():
                self._check(folder, corpus.meta.files or {})
                if self.problem:
                    return
        except Exception as error:  # any error must reach the main thread
            self.problem = f"{str(folder)!r} cannot be checked ({type(error).__name__}: {error})"

    def _check(self, folder: Path, files: dict[str, FileEntry]) -> None:
        own = xxhash.xxh3_64_hexdigest(
            f"{os.uname().nodename} {folder}".encode()
        )  # nodes may have their own copies
        places = [folder / REMEMBERED, self._fallback / f".verified-{own}.json"]
        remembered: dict[str, Any] = {}
        for place in places:
            with suppress(OSError, UserError, TypeError, ValueError):
                remembered |= parse_json(read_regular(place, _MOST_BYTES), "")
        found = dict(remembered)
        for name, entry in files.items():
            state = _state(folder / name, entry)
            if state is None or remembered.get(name) != state:
                self.problem = damage(folder / name, entry)
                if self.problem:
                    return
                if _state(folder / name, entry) == state:  # else it was changed while it was read
                    found[name] = state
        for place in places if found != remembered else ():
            with suppress(OSError):
                write_atomically(place, json.dumps(found, indent=1))
                return


def _state(path: Path, entry: FileEntry) -> str | None:
    """What stays while a file does, with the hash that it must have; None if it cannot be looked at."""
    with suppress(OSError):
        stat = path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {entry.xxh3_128}"
    return None
