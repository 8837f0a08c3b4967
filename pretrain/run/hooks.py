"""Hooks that act between training steps: measurements, releases, changes of the model, and those of users."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError, quote, suggest
from pretrain.checkpoint.state import TrainingState
from pretrain.metrics.file import check_values

if TYPE_CHECKING:
    from pretrain.run.session import Session


@dataclass
class HookResult:
    """Values and console lines that a hook reports for a step."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key of metrics.jsonl -> number, equal on all ranks; lists under names that end in /heads."""
    lines: list[str] = field(default_factory=list)
    """Lines for the console."""
    model: ModelConfig | None = None
    """The model to continue with, if the hook changes its shape; it has noted in the state how (see
    pretrain/growth/edit.py)."""


class Hook:
    """Acts before steps, or at an interval after them. Subclasses override what they need.

    The trainer calls every hook on every rank at the same step, in the order of its list, so each method may
    use collectives. The time spent in a hook is left out of tokens/s. The training numbers do not change
    unless changing them is the hook's purpose.

    What a hook must remember from one session to the next is JSON in ``TrainingState.records[name]``, which
    it alone writes, reads and checks, and the tensors of ``state``.
    """

    name: str
    """Short and unique; checkpoints list pending hooks by it."""

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Act before step ``state.step`` (0-based) is attempted. The values go into that step's row."""
        return HookResult()

    def is_due(self, step: int) -> bool:
        """Whether ``run`` is to be called after this many steps."""
        return False

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Act after step ``state.step``.

        Args:
            engine: DeepSpeed's engine; ``engine.module`` is the model.
            row: the step's row of metrics.jsonl so far, equal on all ranks: ``train_loss`` (nats per
                token), ``grad_norm`` (before clipping), and the values from hooks before this one, such as
                ``val_loss``.

        A request to stop may end it at any forward pass of the engine. It is then called again when the run
        resumes, so it must change nothing before its last forward pass.
        """
        return HookResult()

    def state(self) -> dict[str, Tensor]:
        """Tensors that checkpoints must hold, by names that are unique among all hooks; equal on all ranks.
        They may be of any dtype, and are copied."""
        return {}

    def model_changed(self, model: ModelConfig) -> None:
        """The engine holds *model* now, whose heads differ from those before. Its layers, and all widths but
        those of attention, are the same."""

    def announce(self, session: Session) -> list[str]:
        """Lines about what the hook is going to do, before the first step. On rank 0; not collective."""
        return []

    def summarize(self, session: Session) -> list[str]:
        """Lines about the results of this session, after its last step. On rank 0; not collective."""
        return []

    def begin(self, report: Callable[[str], object]) -> None:
        """Training begins. *report* gives a line to the console and the log, from any thread. Not
        collective."""

    def checkpoint_saved(self, folder: Path) -> None:
        """A checkpoint is whole and in its place. Not collective."""

    def may_prune(self, folder: Path) -> bool:
        """Whether a checkpoint that the settings do not keep may be deleted now; asked on rank 0, from a
        thread, and asked again when the next checkpoint is saved."""
        return True

    def end(self, asked_to_stop: Callable[[], bool]) -> list[str]:
        """Training has ended, and its last checkpoint is saved. Lines for the console. Not collective.

        Args:
            asked_to_stop: whether the session should end soon; to be asked again and again by a hook that
                waits for something.
        """
        return []

    def close(self) -> None:
        """End what the hook has started, such as threads; also after an error. Not collective."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned; *tensors* also holds those of other hooks."""


def check_result(hook: Hook, result: Any) -> HookResult:
    """The result of a hook's method.

    Raises:
        UserError: it is no HookResult, or has a value that metrics.jsonl cannot hold.
    """
    if not isinstance(result, HookResult):
        raise UserError(f"hooks: {hook.name} returned {type(result).__name__}; return a HookResult")
    check_values(result.values, f"hooks: {hook.name}")
    return result


class IntervalHook(Hook):
    """Runs every *interval* steps (0: never) and after the *last* one."""

    def __init__(self, interval: int, last: int) -> None:
        self._interval, self._last = interval, last

    def is_due(self, step: int) -> bool:
        """Whether *step* is a multiple of the interval, or the last."""
        return self._interval > 0 and (step >= self._last or step % self._interval == 0)


def load_hooks(names: Sequence[str]) -> list[type[Hook]]:
    """The classes that the setting ``hooks`` names, as module:class; modules also from the working directory.

    Raises:
        UserError: a module that is not there or fails, a name that it lacks, a class that is no Hook.
    """
    found = []
    if names and (here := str(Path.cwd())) not in sys.path:  # also for what a hook imports later
        sys.path.append(here)
    for name in names:
        module_name, _, class_name = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            reason = str(error).split("\n")[0] or "no reason given"
            raise UserError(
                f"hooks: {quote(name)}: {module_name} cannot be imported ({type(error).__name__}: {reason})"
            ) from error
        kind = getattr(module, class_name, None)
        if not (isinstance(kind, type) and issubclass(kind, Hook)):
            what = "is no class of pretrain.run.hooks.Hook" if kind else "does not exist"
            raise UserError(f"hooks: {quote(name)}: {class_name} {what}{suggest(class_name, vars(module))}")
        found.append(kind)
    return found
