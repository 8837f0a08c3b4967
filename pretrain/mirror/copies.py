"""Copies checkpoints to a store in the background: ``checkpoint.mirror: s3://bucket/folder``.

The store is anything that fsspec opens by a URL. A run's copy is URL/NAME: the files of its checkpoints below
checkpoints/, the manifest of each as the last, so that one without it is incomplete; next to them the files
that describe the run, and ``latest``, the newest checkpoint of the run's curve. Every file is read back
and compared with its hash before a copy counts as safe; ``mirror.json`` in the run's folder lists those, and
a checkpoint that was fetched from there. Where another checkpoint of the same step is in the store, the
manifest's ``places`` names the files that lie under another name than their own.

A thread of rank 0 copies. If the store is unreachable or full, this is reported once, and copying is retried
until the run ends; training never waits for it. Nothing is deleted in the store.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.declared import declared, from_dict, to_dict
from model.errors import MachineError, UserError, quote
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.manifest import MANIFEST, Manifest, verify
from pretrain.config.model_file import split_step
from pretrain.config.run_config import IMPORTED_MODEL, INITIAL_MODEL, RunConfig
from pretrain.config.sources import diff_settings, flatten, load_run_config, make_run
from pretrain.metrics.file import FILE_NAME, last_step
from pretrain.mirror.object_store import Store
from pretrain.utils.files import atomic_file, atomic_folder, file_entry, write_atomically
from pretrain.utils.format import ProgressLine, log_line, print_lines
from pretrain.utils.parsing import parse_yaml, read_json
from pretrain.utils.run_folder import step_of

RECORD = "mirror.json"
OF_THE_RUN = (
    *("config.yaml", "ds_config.json", "decisions.json", "metrics.jsonl", "evaluation.jsonl"),
    *(INITIAL_MODEL, IMPORTED_MODEL),
)
"""Files that describe a run, copied with each checkpoint."""
OF_A_CURVE = (
    *("heads", "architecture", "growth", "data", "seed", "global_batch_tokens", "precision"),
    *("optimizer", "muon", "schedule", "lr_rules", "llr"),
)
"""Settings that distinguish a run from another one of its name."""
RETRY_SECONDS = (5.0, 300.0)
"""First and longest pause after a failure; each is twice the one before."""
CLOSE_SECONDS = 600.0


@declared()
class Record:
    """The contents of mirror.json."""

    url: str
    safe: dict[str, str]
    """By the name of a checkpoint whose copy was verified: the hash of its manifest, since another checkpoint
    of the same step may take its place."""


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
        report: Callable[[str], object] = print_lines,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        open_store: Callable[[str, str], Store] = Store,
    ) -> None:
        self.url, self.run_folder, self.report = url, run_folder, report
        self._retry_seconds, self._open = retry_seconds, open_store
        self._store: Store | None = None
        self._safe = self._read_recorded()
        self._known = _read_safe(run_folder, url).keys()
        self._ahead: int | None = None
        """The step of a newer checkpoint in the store; 0: there is none; None: not known yet."""
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
            self._safe.pop(folder.name, None)
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
            while self._thread.is_alive() and time.monotonic() < ends and not give_up():
                self._thread.join(timeout=0.5)
            return None
        return f"{', '.join(waiting)} not copied to {self.url}; the next session of the run does it"

    def _read_recorded(self) -> dict[str, str]:
        """The checkpoints that earlier sessions have copied to this store, and that were not replaced."""
        known = _read_safe(self.run_folder, self.url)
        return {name: digest for name, digest in known.items() if _identity(self.run_folder, name) == digest}

    def _look_ahead(self) -> None:
        """Find out, once, whether the store's newest checkpoint is beyond this run's and of a session
        elsewhere. One that this folder knows belongs to a curve that the run has left."""
        if self._ahead is not None:
            return
        latest = (self._open_once().text("latest") or "").strip()
        steps = checkpoint_steps(self.run_folder)
        there = step_of(latest) if latest else 0
        self._ahead = 0 if latest in self._known or not steps or there <= steps[-1] else there
        if self._ahead:
            self.report(
                log_line(
                    "note",
                    f"{self.url}/{self.run_folder.name} has {latest}, and stays with it until this run is "
                    f"beyond; to continue from it, start again without {self.run_folder}/checkpoints",
                )
            )

    def _work(self) -> None:
        with suppress(Exception):  # of any class; copies report it
            self._look_ahead()
        pause, longest = self._retry_seconds
        intact = ""  # is read once, not at every try
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                name = self._waiting[0]
            try:
                self._check_owner()
                self._look_ahead()
                copied = self._copy(name)
            except Exception as error:  # of any class: of a library for one store or another
                if not (self.run_folder / "checkpoints" / name).is_dir():
                    self._done(name, None)  # pruned meanwhile, to have room
                    continue
                if name != intact and (problem := self._damage(name)):
                    self.report(log_line("mirror", f"{name} is damaged ({problem}) and is not copied"))
                    self._done(name, None)
                    continue
                intact, self._store = name, None
                self._note_failure(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
                pause = min(2 * pause, longest)
                continue
            pause = self._retry_seconds[0]
            self._done(name, copied)

    def _damage(self, name: str) -> str | None:
        try:
            return verify(self.run_folder / "checkpoints" / name)
        except MachineError:  # tried again, like a store that is away
            return None

    def _open_once(self) -> Store:
        self._store = self._store or self._open(self.url, self.run_folder.name)
        return self._store

    def _check_owner(self) -> None:
        """Raises UserError: the store has a copy of another run of this name."""
        if self._safe:
            return
        if other := _differing_settings(self._open_once(), self.run_folder / "config.yaml"):
            raise UserError(f"it holds another run of this name: {other}")

    def _copy(self, name: str) -> str | None:
        """Copy a checkpoint; the hash of its manifest."""
        identity = _identity(self.run_folder, name)
        store = self._open_once()
        folder = self.run_folder / "checkpoints" / name
        manifest = from_dict(Manifest, read_json(folder / MANIFEST, "manifest"), MANIFEST)
        inside = f"checkpoints/{name}/"
        places = {
            file: store.put(folder / file, inside + file, entry).removeprefix(inside)
            for file, entry in manifest.files.items()
        }
        newest = step_of(name) >= (self._ahead or 0)
        for file in OF_THE_RUN if newest else ():  # those there describe the newer one
            if (self.run_folder / file).is_file():
                store.replace((self.run_folder / file).read_bytes(), file)
        listed = to_dict(manifest) | {"mirror": self.url}
        if elsewhere := {file: place for file, place in places.items() if place != file}:
            listed["places"] = elsewhere
        store.replace(json.dumps(listed, indent=1).encode(), inside + MANIFEST)
        if newest:
            store.replace(f"{name}\n".encode(), "latest")
        return identity

    def _done(self, name: str, copied: str | None) -> None:
        """Take a checkpoint off the list. *copied*: see _copy; None for one that is gone."""
        if copied and self._failing:
            self.report(log_line("mirror", f"{self.url} works again"))
        with self._changed:
            self._failing = self._failing and not copied
            if copied and copied != _identity(self.run_folder, name):  # replaced meanwhile: copied once more
                return
            if self._waiting and self._waiting[0] == name:
                self._waiting.popleft()
            if copied:
                self._safe[name] = copied
                kept = {
                    known: self._safe[known]
                    for known in sorted(self._safe)
                    if (self.run_folder / "checkpoints" / known).is_dir()
                }
                with suppress(OSError):  # the next session compares them once more
                    _write_record(self.run_folder, self.url, kept)
            self._changed.notify_all()

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            first, self._failing = not self._failing, True
            self._changed.notify_all()
        if first:
            self.report(
                log_line(
                    "mirror",
                    f"{self.url} cannot be written ({_reason(error)}); tried again until it works, and "
                    "checkpoints stay here until they are copied",
                )
            )


def _reason(error: Exception) -> str:
    """What a library for one store or another says, or the kind of its error."""
    return quote(str(error).strip() or type(error).__name__, 200, plain=True)


def _identity(run_folder: Path, name: str) -> str | None:
    """The hash of a checkpoint's manifest, which has the hashes of its files; None if it is gone."""
    try:
        return str(file_entry(run_folder / "checkpoints" / name / MANIFEST)["xxh3_128"])
    except OSError:
        return None


def _read_safe(run_folder: Path, url: str) -> dict[str, str]:
    """What mirror.json lists as safe in this store; nothing where there is none yet, or a damaged one."""
    try:
        record = from_dict(Record, read_json(run_folder / RECORD, RECORD), RECORD)
    except (UserError, OSError):
        return {}
    return record.safe if record.url == url else {}


def _write_record(run_folder: Path, url: str, safe: dict[str, str]) -> None:
    write_atomically(run_folder / RECORD, json.dumps(to_dict(Record(url, safe)), indent=1))


def _differing_settings(store: Store, run: RunConfig | Path, moved: bool = False) -> str:
    """Those by which the run that a store has a copy of is another than *run*, settings or a file of them;
    empty: it is the same, or there is none, or settings of another version.

    Args:
        moved: whether corpora may lie elsewhere; what they contain is compared when the run is resumed.
    """
    text = store.text("config.yaml")
    if text is None:
        return ""
    try:
        theirs = make_run(flatten(parse_yaml(text, "config.yaml"), "config.yaml"))
        own = load_run_config(run) if isinstance(run, Path) else run
    except UserError:
        return ""
    return ", ".join(
        f"{name} {quote(before, 60)}, here {quote(now, 60)}"
        for name, (before, now) in diff_settings(theirs, own).items()
        if name.split(".")[0] in OF_A_CURVE
        and not (moved and name == "data" and "builtin" not in (before, now))
    )


def fetch_initial_model(run: RunConfig, open_store: Callable[[str, str], Store] = Store) -> None:
    """Fetch the description of the model that a lost run began with (``init_from``), if its source is gone
    too, as that of an import is with it: the run's settings alone then describe no model. Where the store has
    none nothing happens."""
    if run.checkpoint.mirror is None or run.init_from is None or checkpoint_steps(run.folder):
        return
    imported = Path(run.model) == run.folder / IMPORTED_MODEL
    kept = run.folder / (IMPORTED_MODEL if imported else INITIAL_MODEL)
    if not kept.exists() and not Path(split_step(run.init_from)[0]).is_dir():
        with suppress(Exception):  # of any class; what is missing is then reported where it is needed
            text = open_store(run.checkpoint.mirror, run.folder.name).text(kept.name)
            if text is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, text)


def restore_lost(
    url: str,
    run_folder: Path,
    open_store: Callable[[str, str], Store] = Store,
    run: RunConfig | None = None,
) -> list[str]:
    """Fetch the newest whole checkpoint of a run whose folder holds none.

    Args:
        run: its settings; None does not compare them with those of the copy.

    Returns:
        Lines about what was fetched and passed over; none if the store has nothing of this run.

    Raises:
        UserError: the store has another run of this name, or checkpoints of the run and none is whole.
        MachineError: it cannot be read now, or the disk is full.
    """
    notes: list[str] = []
    try:
        store = open_store(url, run_folder.name)
        latest = (store.text("latest") or "").strip()
        if not latest:
            return []
        if run is not None and (other := _differing_settings(store, run, moved=True)):
            raise UserError(
                f"checkpoint.mirror: {url}/{run_folder.name} is another run ({other}); give its settings to "
                "continue it, or another --name"
            )
        # Those beyond belong to a curve that the run has left.
        names = [name for name in store.checkpoints() if step_of(name) <= step_of(latest)]
        for name in reversed(names):
            problem = _fetch(store, name, run_folder)
            if problem is None:
                _fetch_descriptions(store, run_folder, name)
                # So that it is not copied back.
                _write_record(run_folder, url, {name: _identity(run_folder, name) or ""})
                return [*notes, f"{name} was fetched from {url}: the run's folder held no checkpoint"]
            notes.append(f"{name} in {url} is not whole ({problem})")
    except UserError:
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        what = f"{run_folder} is on a full disk" if full else f"{url} cannot be read ({_reason(error)})"
        raise MachineError(
            f"checkpoint.mirror: {what}, and {run_folder} holds no checkpoint; try again, or leave "
            "checkpoint.mirror out to start from scratch"
        ) from error
    raise UserError(
        f"checkpoint.mirror: {'; '.join(notes)}, and {run_folder} holds no checkpoint; give another --name "
        "to start from scratch"
    )


def refuse_copy(url: str, run_folder: Path, open_store: Callable[[str, str], Store] = Store) -> None:
    """Reject a new run where a store has checkpoints of one of its name, which would be replaced.

    Raises:
        UserError: it has some.
        MachineError: it cannot be read.
    """
    try:
        latest = open_store(url, run_folder.name).text("latest")
    except Exception as error:  # of any class
        raise MachineError(
            f"checkpoint.mirror: {url} cannot be read ({_reason(error)}), and may hold a run of this name; "
            "try again, or leave checkpoint.mirror out"
        ) from error
    if latest:
        raise UserError(
            f"resume: {url}/{run_folder.name} already holds a checkpoint ({latest.strip()}); give --name for "
            "a new run, or --resume auto to continue it"
        )


def repair_checkpoint(url: str, folder: Path, open_store: Callable[[str, str], Store] = Store) -> bool:
    """Fetch the copy of a damaged checkpoint into its place, if there is a verified one; whether it was.

    Raises:
        MachineError: the store cannot be read now; the run would continue from an older checkpoint.
    """
    run_folder = folder.parent.parent
    if folder.name not in _read_safe(run_folder, url):
        return False
    try:
        return _fetch(open_store(url, run_folder.name), folder.name, run_folder) is None
    except Exception as error:  # of any class
        raise MachineError(
            f"checkpoint.mirror: {folder.name} is damaged, and its copy in {url} cannot be read "
            f"({_reason(error)}); try again, or leave checkpoint.mirror out to continue from an earlier one"
        ) from error


def _fetch(store: Store, name: str, run_folder: Path) -> str | None:
    """Fetch a checkpoint into its place; what is wrong with it, if anything is."""
    target = run_folder / "checkpoints" / name
    text = store.text(f"checkpoints/{name}/{MANIFEST}")
    if text is None:
        return f"{MANIFEST} is missing"
    try:
        values: Mapping[str, Any] = json.loads(text)
        listed = {key: value for key, value in values.items() if key not in ("mirror", "places")}
        manifest, places = from_dict(Manifest, listed, MANIFEST), values.get("places", {})
        total, fetched = sum(entry.bytes for entry in manifest.files.values()), 0

        def show(size: int) -> None:
            nonlocal fetched
            fetched += size
            progress(max(fetched // 10**6, 1), max(total // 10**6, 1))

        with atomic_folder(target) as partial, ProgressLine(f"fetching {name}", "MB") as progress:
            for file in manifest.files:  # names inside the folder: Manifest rejects others
                store.get(f"checkpoints/{name}/{places.get(file, file)}", partial / file, show)
            (partial / MANIFEST).write_text(json.dumps(to_dict(manifest), indent=1), encoding="utf-8")
            if problem := verify(partial):
                raise UserError(problem)
    except (UserError, FileNotFoundError, ValueError, AttributeError) as error:
        return quote(error, 200, plain=True)
    return None


def _fetch_descriptions(store: Store, run_folder: Path, name: str) -> None:
    # Rows here that end before the checkpoint are those of a session that is left.
    behind = last_step(run_folder / FILE_NAME) < step_of(name)
    for file in OF_THE_RUN:
        if not (run_folder / file).exists() or (behind and file.endswith(".jsonl")):
            with suppress(FileNotFoundError), atomic_file(run_folder / file) as partial:
                store.get(file, partial)
    write_atomically(run_folder / "latest", f"{name}\n")
