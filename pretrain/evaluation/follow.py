"""Scores each new checkpoint of a run that trains in another job: ``--follow runs/NAME``.

A row for each is written to evaluation.jsonl in the run's folder, of the form of metrics.jsonl; the trainer
does not read it. A row names the checkpoint by the hash of its manifest, so that whoever is restarted scores
only what is new. Nothing is held between two checkpoints: either job may be killed at any time.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import MachineError, UserError
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.manifest import MANIFEST
from pretrain.checkpoint.state import TrainingState, read_state
from pretrain.metrics.file import EVALUATION_NAME, FILE_NAME, MetricsFile, read_rows
from pretrain.run.folder import NAME as LOCK_NAME
from pretrain.run.folder import RunLock, is_held
from pretrain.runtime.environment import report_progress
from pretrain.runtime.world import World
from pretrain.utils.format import log_line

POLL_SECONDS = 10.0
"""Between two looks at a run's folder."""
TIMEOUT = 3600
"""Seconds that a run may be gone, waiting in a queue for example."""
CONTINUE = 75
"""Exit code of a job that was asked to stop and is to be started again; see slurm/launch.sh."""

Score = Callable[[int], dict[str, float]]
"""Scores the checkpoint of a step, on every rank: values by ``task/metric``. Raises UserError for one that
cannot be opened."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is to be scored."""

    step: int
    identity: str
    """Hash of its manifest, which lists the hashes of its files."""


class Follower:
    """What is left to score of a run.

    Args:
        folder: the run's; it need not exist yet.
        settings: what the scores depend on, as a row keeps it. A checkpoint is scored once for each.
        timeout: seconds without anything new after which a run that no process holds is gone.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], timeout: float = TIMEOUT) -> None:
        self.folder, self.settings, self.timeout = folder, settings, timeout
        self._signs: list[int] = []
        self._quiet_since = time.monotonic()
        self._file = MetricsFile(folder / EVALUATION_NAME, then="scoring continues")
        self._passed_over: set[Found] = set()
        self._scored: set[Found] | None = None

    def read(self) -> None:
        """Read what is scored already, and drop a line that was cut short."""
        self._file.truncate_after(sys.maxsize)
        rows = read_rows(self.folder / EVALUATION_NAME)
        self._scored = {
            Found(row["step"], row["checkpoint"])
            for row in rows
            if row.get("scored") == self.settings and isinstance(row.get("checkpoint"), str)
        }

    def next(self) -> Found | None:
        """The oldest checkpoint that is neither scored nor passed over; None if there is none now."""
        if self._scored is None:
            if not self.folder.is_dir():
                return None
            self.read()
        assert self._scored is not None
        for step in checkpoint_steps(self.folder):
            with suppress(OSError):  # pruned meanwhile
                manifest = (checkpoint_path(self.folder, step) / MANIFEST).read_bytes()
                found = Found(step, hashlib.sha256(manifest).hexdigest()[:16])
                if found not in self._scored | self._passed_over:
                    return found
        return None

    def pass_over(self, found: Found, problem: str) -> None:
        """Report a checkpoint that cannot be scored, and do not look at it again."""
        self._quiet_since = time.monotonic()
        self._passed_over.add(found)
        print(log_line("note", f"checkpoint of step {found.step:,} is passed over ({problem})"), flush=True)

    def write(self, found: Found, state: TrainingState, scores: dict[str, float]) -> None:
        """Note the scores of a checkpoint."""
        assert self._scored is not None
        self._quiet_since = time.monotonic()
        row: dict[str, Any] = {"tokens": state.tokens, "checkpoint": found.identity, "scored": self.settings}
        self._file.append(found.step, row | {f"evaluation/{name}": value for name, value in scores.items()})
        self._file.close()
        self._scored.add(found)

    def progress(self) -> tuple[int, int] | None:
        """Steps of the newest checkpoint, and of the whole run; None if there is none that can be read."""
        steps = checkpoint_steps(self.folder)
        if not steps:
            return None
        try:
            state = read_state(checkpoint_path(self.folder, steps[-1]))
        except UserError:
            return None  # pruned or damaged
        return state.step, state.run.get("steps", sys.maxsize)

    def finished(self) -> bool:
        """Whether the run has all its steps, and a checkpoint of the last."""
        progress = self.progress()
        return progress is not None and progress[0] >= progress[1]

    def summarize(self) -> str:
        """A line about a finished run.

        Raises:
            UserError: nothing is scored, since every checkpoint was passed over.
            MachineError: scores are not in the file, since it could not be written.
        """
        if self._file.incomplete:
            raise MachineError(f"cannot write {self._file.path}; the same command scores again what it lacks")
        scored, passed_over = len(self._scored or ()), len(self._passed_over)
        if passed_over and not scored:
            raise UserError(
                f"tasks: none of the {passed_over:,} checkpoints of {self.folder} could be scored; the notes "
                "above say why"
            )
        left_out = f", passed over: {passed_over:,}" if passed_over else ""
        return f"{self.folder} has all its steps; checkpoints scored: {scored:,}{left_out}"

    def check_alive(self) -> None:
        """Wait no longer for a run that is gone: its trainer has written nothing for *timeout* seconds, and
        no process holds its folder. A job that is requeued has this time to start again.

        The lock is tried only then, since trying it takes it for an instant.

        Raises:
            UserError: it is gone, or has not begun.
        """
        signs, now = [], time.monotonic()
        for name in (LOCK_NAME, FILE_NAME, "checkpoints"):
            with suppress(OSError):
                signs.append((self.folder / name).stat().st_mtime_ns)
        if signs != self._signs:
            self._signs, self._quiet_since = signs, now
        if now - self._quiet_since < self.timeout:
            return
        if is_held(self.folder):
            self._quiet_since = now
            return
        advice = "continue the run and follow it again, or wait longer with --follow_timeout"
        if not signs:
            raise UserError(f"model: {self.folder} has not begun within {self.timeout:,} s; {advice}")
        progress = self.progress()
        has = f"has {progress[0]:,} of {progress[1]:,} steps" if progress else "has no checkpoint"
        raise UserError(
            f"model: {self.folder} {has}, no process trains it, and nothing was written for "
            f"{self.timeout:,} s; {advice}"
        )


def follow(
    folder: Path, settings: dict[str, Any], score: Score, world: World, timeout: float = TIMEOUT
) -> None:
    """Score every valid checkpoint of a run once, as they are written, until the run has ended. Collective.

    Raises:
        UserError: another process follows the run, its folder cannot be written, the run is gone (see
            Follower.check_alive), or no checkpoint could be scored.
    """
    follower = Follower(folder, settings, timeout)
    lock: list[RunLock] = []

    def look() -> tuple[Found | None, bool]:
        if not lock and folder.is_dir():
            lock.append(RunLock(folder / "evaluation", "model", "model"))
        ended = follower.finished()  # before: what is written meanwhile is found the next time
        found = follower.next()
        if found is None and not ended:
            follower.check_alive()
        return found, ended

    waiting = False
    while True:
        found, ended = world.on_rank_zero(look)
        if found is None:
            if ended:
                break
            if not waiting and world.is_main:
                print(log_line("waiting", f"for checkpoints of {folder}"), flush=True)
            waiting = True
            time.sleep(POLL_SECONDS)
            continue
        waiting = False
        _score_one(follower, found, score, world)
    summary = world.on_rank_zero(follower.summarize)
    if world.is_main:
        print(log_line("finished", summary))
    for held in lock:
        held.release()


def stop_at_signal(following: bool) -> None:
    """Let SIGUSR1 end a process that follows a run with CONTINUE; others ignore it."""
    signal.signal(signal.SIGUSR1, (lambda *_: sys.exit(CONTINUE)) if following else signal.SIG_IGN)


def _score_one(follower: Follower, found: Found, score: Score, world: World) -> None:
    began = time.monotonic()
    try:
        state = world.on_rank_zero(lambda: read_state(checkpoint_path(follower.folder, found.step)))
        scores = score(found.step)
    except MachineError as error:  # on every rank: it cannot be read now, and is tried again
        if world.is_main:
            print(log_line("note", f"{error}; trying again"), flush=True)
        time.sleep(POLL_SECONDS)
        return
    except UserError as error:  # on every rank: damaged, pruned meanwhile, or weights that are not finite
        if world.is_main:
            follower.pass_over(found, str(error))
        return
    if world.is_main:
        follower.write(found, state, scores)
        report_progress()
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        line = f"step {found.step:,}: {shown} ({time.monotonic() - began:.1f} s)"
        print(log_line("scores", line), flush=True)


def settings_of(options: Any, tasks: list[str]) -> dict[str, Any]:
    """What the scores of a command line depend on, as JSON keeps it."""
    return {"tasks": tasks} | {name: getattr(options, name) for name in ("limit", "num_fewshot", "dtype")}
