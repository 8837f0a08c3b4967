"""Copying to the mirror as a hook of the trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.checkpoint.finder import checkpoint_steps
from pretrain.mirror.copies import Mirror
from pretrain.run.hooks import Hook
from pretrain.utils.format import log_line
from pretrain.utils.run_folder import step_of

if TYPE_CHECKING:
    from pretrain.run.session import Session


class MirrorHook(Hook):
    """Copies to ``checkpoint.mirror`` what earlier sessions have not, and every checkpoint that is saved.

    A checkpoint stays in the run's folder until its copy is safe. If less than ``checkpoint.mirror_reserve``
    GiB are left there, all but the newest two are deleted even without a copy.
    """

    name = "mirror"

    def __init__(self, session: Session) -> None:
        self._folder, self._config = session.run.folder, session.run.checkpoint
        self._copies = session.world.is_main
        self._mirror: Mirror | None = None
        self._ended = False
        self._newest = 0

    def begin(self, report: Callable[[str], object]) -> None:
        """Begin to copy, in a thread of rank 0."""
        if self._copies and self._config.mirror is not None:
            self._mirror = Mirror(self._config.mirror, self._folder, report)

    def checkpoint_saved(self, folder: Path) -> None:
        """Copy it after those that wait."""
        if self._mirror is not None:
            self._newest = step_of(folder.name)
            self._mirror.add(folder)

    def may_prune(self, folder: Path) -> bool:
        """Whether its copy is safe, or it must make room."""
        if self._mirror is None or self._mirror.is_safe(folder):
            return True
        if self._ended:  # the thread that deletes may be still at work
            return False
        # Steps beyond the newest belong to a curve that the run has left.
        steps = [step for step in checkpoint_steps(self._folder) if step <= self._newest]
        if step_of(folder.name) in steps[-2:]:
            return False
        if shutil.disk_usage(self._folder).free >= self._config.mirror_reserve * 2**30:
            return False
        self._mirror.report(
            log_line(
                "mirror",
                f"{folder.name} is deleted before it was copied: less than {self._config.mirror_reserve:g} "
                "GiB are left here (checkpoint.mirror_reserve)",
            )
        )
        return True

    def end(self, asked_to_stop: Callable[[], bool]) -> list[str]:
        """Wait until everything is copied, the store fails, or the session is asked to stop."""
        if self._mirror is None or self._ended:
            return []
        self._ended = True
        left = self._mirror.close(give_up=asked_to_stop)
        return [log_line("mirror", left)] if left else []

    def close(self) -> None:
        """Copy no more; the next session does it."""
        self.end(lambda: True)
