"""Logs to Weights & Biases from a queue, and to TensorBoard: it never prompts, never slows a step, and never
ends a run."""

from __future__ import annotations

import os
import queue
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from model.errors import quote
from pretrain.utils.files import write_atomically
from pretrain.utils.format import log_line

# Online, the last rows may be under way when the training ends. They are on disk then, and can be synced.
CLOSE_SECONDS = 60.0
INIT_SECONDS = 30.0
MOST_GROUP, MOST_TAG = 128, 64  # characters that wandb takes


class WandbLogger:
    """Sends rows to wandb from a separate thread.

    Starting wandb takes a second or more (it starts a service process, and online it talks to a server), so
    all of its work happens in the thread and rows wait in a queue. The run's id is kept in the folder, and a
    resumed run continues the same curves. Values are plotted over tokens.

    wandb drops every row before its newest step. Training steps that a resumed run repeats are left out,
    since they are the same numbers again; other values of earlier steps go into the next row, with their
    token counts.

    Args:
        folder: the run's folder; wandb's files go to its ``wandb`` folder.
        mode: ``auto`` is what WANDB_MODE says, and without it writes nothing. ``online`` becomes offline when
            the user is not logged in or the server does not answer.
        group: which runs wandb shows together, such as the seeds of one experiment; WANDB_RUN_GROUP comes
            first.
        tags: to find the run by; WANDB_TAGS come first.
        newest_step: the newest step that earlier sessions have logged.
        report: where to say what wandb does; called from the thread.
        project: what the run is filed under; by default WANDB_PROJECT, else head-schedules.
        filed: further arguments of wandb.init, such as the run's configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str = "auto",
        group: str | None = None,
        project: str | None = None,
        tags: Sequence[str] = (),
        newest_step: int = 0,
        report: Callable[[str], None] = print,
        **filed: Any,
    ) -> None:
        self.folder = folder
        self.newest_step = newest_step
        self._report = report
        self._rows: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        mode = os.environ.get("WANDB_MODE", "disabled") if mode == "auto" else mode
        if mode == "disabled":
            return
        if mode == "offline":
            # Before the import reads it: a run that is not to go online sends no error reports either.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if group is not None and "WANDB_RUN_GROUP" not in os.environ:
            filed["group"] = group[:MOST_GROUP]
        if project is not None or "WANDB_PROJECT" not in os.environ:
            filed["project"] = project or "head-schedules"
        if tags and "WANDB_TAGS" not in os.environ:
            filed["tags"] = [tag[:MOST_TAG] for tag in tags]
        try:
            # Here and not in the thread: imports during those of training could meet half-loaded modules.
            import wandb
        except Exception as error:
            self._say_failed(error)
            return
        self._thread = threading.Thread(
            target=self._work, args=[wandb, mode, filed], name="wandb", daemon=True
        )
        self._thread.start()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Hand over one row; returns at once."""
        if self._thread is not None:
            self._rows.put((step, dict(row)))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait for wandb to write what it has, but not longer than *timeout* seconds."""
        if self._thread is None:
            return
        self._rows.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._say(f"still busy after {timeout:g} s; to send the rest: {self._sync_command('*run-*')}")
        self._thread = None

    def _work(self, wandb: ModuleType, mode: str, filed: dict[str, Any]) -> None:
        """Start wandb, pass on rows until the end, finish."""
        try:
            run = self._start(wandb, mode, filed)
            run.define_metric("tokens")
            run.define_metric("*", step_metric="tokens")
            # Online wandb knows what the run has; offline it begins at 0 in every session.
            first = max(run.step, self.newest_step + 1)
            while (item := self._rows.get()) is not None:
                step, row = item
                if step >= first:
                    run.log(row, step=step)
                elif "train_loss" not in row:
                    run.log(row, step=first)
            run.finish()
        except Exception as error:
            self._say_failed(error)

    def _start(self, wandb: ModuleType, mode: str, filed: dict[str, Any]) -> Any:
        """Open the run, online if that is requested and works."""
        wandb.setup(settings=wandb.Settings(silent=True))
        filed = {
            "name": self.folder.name,
            "id": self._run_id(),
            "resume": "allow",
            "dir": str(self.folder),
            # The console belongs to the run: wandb neither prints nor captures, nor looks for code to send.
            "settings": wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_SECONDS,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
            ),
        } | filed
        if mode == "online" and wandb.login(prompt=False, verify=False):
            try:
                run = wandb.init(mode="online", **filed)
                self._say(run.url)
                return run
            except Exception as error:
                self._say(f"cannot go online ({_first_line(error)}): writing offline")
                wandb.teardown()  # the service still holds the run that did not start
        run = wandb.init(mode="offline", **filed)
        self._say(f"offline; to send it: {self._sync_command('offline-run-*')}")
        return run

    def _sync_command(self, sessions: str) -> str:
        """The shell command that sends all sessions of the run; each has a folder, and wandb keeps their
        order."""
        folder = shlex.quote(f"{self.folder}/wandb/")
        return f"wandb sync {folder}{sessions}"

    def _run_id(self) -> str:
        """Return the id of this run folder's wandb run; the first call creates it."""
        path = self.folder / "wandb" / "run_id"
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        run_id = secrets.token_hex(4)
        write_atomically(path, run_id + "\n")
        return run_id

    def _say(self, text: str) -> None:
        self._report(log_line("wandb", text))

    def _say_failed(self, error: Exception) -> None:
        self._say(f"stopped ({_first_line(error)}); the run continues, metrics.jsonl has everything")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


FOLDER = "tensorboard"


class TensorBoardLogger:
    """One event file for each session of a run, in the run's folder ``tensorboard``.

    The files are written by a thread of the library. A failure is reported once; no step waits or fails
    because of it. TensorBoard hides what an earlier session logged from the first step of a later one on.

    Args:
        folder: the run's.
        first_step: the first step that this session trains.
        report: where to say what fails.
    """

    def __init__(self, folder: Path, first_step: int, report: Callable[[str], None] = print) -> None:
        self._writer: Any = None
        self._report = report
        with self._report_failure():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row; lists and text are left to metrics.jsonl."""
        if self._writer is not None:
            with self._report_failure():
                for key, value in row.items():
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            with self._report_failure():
                self._writer.close()

    @contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Report an error of the block, and write no more."""
        try:
            yield
        except Exception as error:
            self._writer = None
            reason = quote(error, 200, plain=True)
            text = f"stopped ({reason}); the run continues, metrics.jsonl has everything"
            self._report(log_line("tensorboard", text))
