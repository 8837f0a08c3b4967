"""Copies checkpoints to a store beside the training: ``checkpoint.mirror: s3://bucket/folder``.

The store is anything that fsspec opens by a URL. A run's copy is URL/NAME: the files of its checkpoints below
checkpoints/, the manifest of each as the last, so that one without it is not whole; beside them what the
run's folder says of itself, and ``latest``, the newest checkpoint of the run's curve. Every file is read back
and compared with its hash before a copy counts as safe; ``mirror.json`` in the run's folder lists those.

A thread of rank 0 copies. A store that is away or full is said once, and tried again until the run ends;
nothing in the training waits for it. Nothing is deleted in the store.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from model.declared import declared, from_plain, to_plain
from model.errors import UserError, shown
from pretrain.checkpoint.finder import STEP, checkpoint_path, checkpoint_steps
from pretrain.checkpoint.manifest import MANIFEST, Manifest, verify
from pretrain.utils.extras import check_installed
from pretrain.utils.files import CHUNK_BYTES, atomic_file, atomic_folder, open_regular, write_atomically
from pretrain.utils.parsing import MOST_BYTES, read_json
from pretrain.utils.text import labelled, say

RECORD = "mirror.json"
OF_THE_RUN = ("config.yaml", "ds_config.json", "decisions.json", "metrics.jsonl")
"""What a run that was lost cannot be understood without, copied with each checkpoint."""
RETRY_SECONDS = (5.0, 300.0)
"""First and longest pause after a failure; each is twice the one before."""
CLOSE_SECONDS = 600.0
PROTOCOLS = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
"""By a URL's protocol: the package that opens it."""


@declared()
class Record:
    """The contents of mirror.json."""

    url: str
    safe: list[str]
    """Names of checkpoints whose copies were verified."""


def check_mirror(url: str) -> None:
    """Refuse a URL that cannot be opened here; no connection is made.

    Raises:
        UserError: it says what is valid, or what to install.
    """
    parts = urlsplit(url)
    if parts.scheme not in PROTOCOLS or not (parts.netloc or parts.path.strip("/")):
        raise UserError(
            f"checkpoint.mirror: {shown(url)} is not valid; give a URL such as s3://bucket/folder, "
            "gs://bucket/folder or file:///folder"
        )
    check_installed(PROTOCOLS[parts.scheme], "checkpoint.mirror")


class Store:
    """The copy of one run in a store.

    Raises:
        Exception: what fsspec raises, of any class, from every method.
    """

    def __init__(self, url: str, run: str) -> None:
        from fsspec.core import url_to_fs

        self.files, root = url_to_fs(url.rstrip("/"), use_listings_cache=False, skip_instance_cache=True)
        self.root = f"{root}/{run}"

    def put(self, local: Path, name: str) -> str:
        """Copy a file, read it back, and compare; its hash."""
        path, digest = f"{self.root}/{name}", xxhash.xxh3_128()
        self._make_parent(path)
        with open_regular(local) as source, self.files.open(path, "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
        if self._digest(name) != digest.hexdigest():
            raise OSError(f"{name} does not come back as it was written")
        return digest.hexdigest()

    def put_text(self, text: str, name: str) -> None:
        """Write a small file."""
        path = f"{self.root}/{name}"
        self._make_parent(path)
        self.files.pipe_file(path, text.encode())

    def _digest(self, name: str) -> str:
        digest = xxhash.xxh3_128()
        with self.files.open(f"{self.root}/{name}", "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def get(self, name: str, local: Path) -> None:
        """Fetch a file."""
        local.parent.mkdir(parents=True, exist_ok=True)
        with self.files.open(f"{self.root}/{name}", "rb") as source, local.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def text(self, name: str) -> str | None:
        """A small file; None if it is not there."""
        try:
            with self.files.open(f"{self.root}/{name}", "rb") as file:
                return str(file.read(MOST_BYTES).decode("utf-8"))
        except FileNotFoundError:
            return None

    def checkpoints(self) -> list[str]:
        """Names of checkpoint folders, whole or not."""
        try:
            listed = self.files.ls(f"{self.root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in listed]
        return sorted(filter(STEP.fullmatch, names), key=lambda name: int(name.partition("_")[2]))

    def _make_parent(self, path: str) -> None:
        if "file" in self.files.protocol:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)


class Mirror:
    """Copies the checkpoints of a run on rank 0, one after another, in a thread.

    Args:
        report: receives a line when the store fails, and when it works again; called from the thread.
        open_store: opens the store; a failure is tried again like any other.
    """

    def __init__(
        self,
        url: str,
        run_folder: Path,
        report: Callable[[str], object] = say,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        open_store: Callable[[str, str], Store] = Store,
    ) -> None:
        self.url, self.run_folder, self.report = url, run_folder, report
        self._retry_seconds, self._open = retry_seconds, open_store
        self._store: Store | None = None
        self._safe = self._recorded()
        # Those that an earlier session did not get to come first.
        names = [checkpoint_path(run_folder, step).name for step in checkpoint_steps(run_folder)]
        self._waiting = deque(name for name in names if name not in self._safe)
        self._changed = threading.Condition()
        self._closing = self._failing = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Copy a checkpoint that is whole; it may replace one of the same step."""
        with self._changed:
            self._safe.discard(folder.name)
            if folder.name not in self._waiting:
                self._waiting.append(folder.name)
            self._changed.notify_all()

    def is_safe(self, folder: Path) -> bool:
        """Whether a checkpoint's copy was verified."""
        return folder.name in self._safe

    def close(
        self, seconds: float = CLOSE_SECONDS, give_up: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait until everything is copied, while the store works, at most so long; a line on what is not.

        Args:
            give_up: asked every half a second whether to wait no longer.
        """
        ends = time.monotonic() + seconds
        with self._changed:
            while self._waiting and not self._failing and time.monotonic() < ends and not give_up():
                self._changed.wait(0.5)
            self._closing = True
            self._changed.notify_all()
            waiting = [*self._waiting]
        if not waiting:
            self._thread.join(timeout=seconds)
            return None
        return f"{', '.join(waiting)} not copied to {self.url}; the next session of the run does it"

    def _recorded(self) -> set[str]:
        """The checkpoints that earlier sessions have copied to this store, and that were not replaced."""
        try:
            record = from_plain(Record, read_json(self.run_folder / RECORD, RECORD), RECORD)
        except (UserError, OSError):  # none yet, or damaged: everything is copied again
            return set()
        return set(record.safe) if record.url == self.url else set()

    def _work(self) -> None:
        pause, longest = self._retry_seconds
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                name = self._waiting[0]
            try:
                self._copy(name)
            except Exception as error:  # of any class: of a library for one store or another
                if not (self.run_folder / "checkpoints" / name).is_dir():
                    self._done(name, safe=False)  # pruned meanwhile, to have room
                    continue
                self._store = None
                self._failed(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
                pause = min(2 * pause, longest)
                continue
            pause = self._retry_seconds[0]
            self._done(name, safe=True)

    def _copy(self, name: str) -> None:
        store = self._store = self._store or self._open(self.url, self.run_folder.name)
        folder = self.run_folder / "checkpoints" / name
        manifest = from_plain(Manifest, read_json(folder / MANIFEST, "manifest"), MANIFEST)
        for file, entry in manifest.files.items():
            if store.put(folder / file, f"checkpoints/{name}/{file}") != entry.xxh3_128:
                raise OSError(f"{name}/{file} is not what its manifest says")
        for file in OF_THE_RUN:
            if (self.run_folder / file).is_file():
                store.put(self.run_folder / file, file)
        with_mirror = to_plain(manifest) | {"mirror": self.url}
        store.put_text(json.dumps(with_mirror, indent=1), f"checkpoints/{name}/{MANIFEST}")
        store.put_text(f"{name}\n", "latest")

    def _done(self, name: str, safe: bool) -> None:
        if safe and self._failing:
            self.report(labelled("mirror", f"{self.url} works again"))
        with self._changed:
            self._failing = self._failing and not safe
            if self._waiting and self._waiting[0] == name:
                self._waiting.popleft()
            if safe:
                self._safe.add(name)
                kept = sorted(
                    known for known in self._safe if (self.run_folder / "checkpoints" / known).is_dir()
                )
                record = json.dumps(to_plain(Record(self.url, kept)), indent=1)
                with suppress(OSError):  # the next session copies once more
                    write_atomically(self.run_folder / RECORD, record)
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._changed:
            first, self._failing = not self._failing, True
            self._changed.notify_all()
        if first:
            reason = shown(str(error).strip() or type(error).__name__, 200, plain=True)
            self.report(
                labelled(
                    "mirror",
                    f"{self.url} cannot be written ({reason}); tried again until it works, and checkpoints "
                    "stay here until they are copied",
                )
            )


def restore_lost(url: str, run_folder: Path, open_store: Callable[[str, str], Store] = Store) -> list[str]:
    """Fetch the newest whole checkpoint of a run whose folder holds none.

    Returns:
        Lines about what was fetched and passed over; none if the store has nothing of this run.

    Raises:
        UserError: the store cannot be read, or it has checkpoints of the run and none is whole.
    """
    notes: list[str] = []
    try:
        store = open_store(url, run_folder.name)
        latest = (store.text("latest") or "").strip()
        if not latest:
            return []
        # Those beyond belong to a curve that the run has left.
        names = [name for name in store.checkpoints() if int(name[5:]) <= int(latest[5:] or -1)]
        for name in reversed(names):
            problem = _fetch(store, name, run_folder)
            if problem is None:
                _fetch_descriptions(store, run_folder, name)
                return [*notes, f"{name} was fetched from {url}: the run's folder held no checkpoint"]
            notes.append(f"{name} in {url} is not whole ({problem})")
    except Exception as error:
        reason = shown(str(error).strip() or type(error).__name__, 200, plain=True)
        raise UserError(
            f"checkpoint.mirror: {url} cannot be read ({reason}), and {run_folder} holds no checkpoint; try "
            "again when it can, or leave checkpoint.mirror out to begin anew"
        ) from error
    raise UserError(
        f"checkpoint.mirror: {'; '.join(notes)}, and {run_folder} holds no checkpoint; give another --name "
        "to begin anew"
    )


def _fetch(store: Store, name: str, run_folder: Path) -> str | None:
    """Fetch a checkpoint into its place; what is wrong with it, if anything is."""
    target = run_folder / "checkpoints" / name
    text = store.text(f"checkpoints/{name}/{MANIFEST}")
    if text is None:
        return f"{MANIFEST} is missing"
    try:
        values: Mapping[str, Any] = json.loads(text)
        listed = {key: value for key, value in values.items() if key != "mirror"}
        manifest = from_plain(Manifest, listed, MANIFEST)
        with atomic_folder(target) as partial:
            for file in manifest.files:  # names inside the folder: Manifest refuses others
                store.get(f"checkpoints/{name}/{file}", partial / file)
            (partial / MANIFEST).write_text(json.dumps(to_plain(manifest), indent=1), encoding="utf-8")
            if problem := verify(partial):
                raise UserError(problem)
    except (UserError, FileNotFoundError, ValueError, AttributeError) as error:
        return shown(error, 200, plain=True)
    return None


def _fetch_descriptions(store: Store, run_folder: Path, name: str) -> None:
    for file in OF_THE_RUN:
        if not (run_folder / file).exists():
            with suppress(FileNotFoundError), atomic_file(run_folder / file) as partial:
                store.get(file, partial)
    write_atomically(run_folder / "latest", f"{name}\n")


def has_room(folder: Path, reserve_bytes: float) -> bool:
    """Whether the file system of *folder* has so much space left."""
    return shutil.disk_usage(folder).free >= reserve_bytes
