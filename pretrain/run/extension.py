"""Extension: what an extension brings to a run. The core calls these methods and knows nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from model.config import ModelConfig
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.config.run_config import RunConfig
from pretrain.extensions import extensions
from pretrain.run.data import RunData
from pretrain.run.hooks import Hook

if TYPE_CHECKING:
    from pretrain.run.session import Session


class Extension:
    """Base of all extensions; each overrides what it needs. pretrain/extensions.py lists them.

    Its settings are a Section (pretrain/config/section.py). What it must remember from one session to the
    next is JSON in ``TrainingState.records[name]``, which it alone writes, reads and checks, and tensors of
    its hooks.
    """

    name: str
    """As listed; also the name of its record."""

    def built_in_data(self, run: RunConfig, report: Callable[[object], None]) -> Path | None:
        """The folder of the built-in corpus for runs of the extension's kind, made if needed; None for other
        runs."""
        return None

    def data(self, run: RunConfig, data: RunData) -> RunData:
        """The run's data as the extension reads them; *data* itself unless they are of its kind."""
        return data

    def varies_heads(self, run: RunConfig) -> bool:
        """Whether head counts may change while the run trains, so that ranks may have to share heads in any
        way."""
        return False

    def continued_model(
        self, run: RunConfig, asked: ModelConfig, saved: TrainingState
    ) -> tuple[ModelConfig, ModelConfig] | None:
        """The model that a checkpoint must hold, and the one that the run goes on with; None to leave it to
        others.

        Args:
            asked: the model that the settings describe.
            saved: the checkpoint's state.

        Raises:
            UserError: the settings ask for something else than the checkpoint has.
        """
        return None

    def view(self, checkpoint: UnshardedCheckpoint) -> UnshardedCheckpoint:
        """The checkpoint as the run goes on from it, perhaps as another model than its files hold."""
        return checkpoint

    def loaded(self, state: TrainingState) -> None:
        """The engine holds what ``view`` showed; *state* goes on from there."""

    def validation(self, session: Session) -> Hook | None:
        """The hook that takes the place of the loss on held-out windows, named validation; None to leave
        that."""
        return None

    def hooks(self, session: Session) -> list[Hook]:
        """The hooks that the settings ask for. What the user should know goes to ``session.notes``."""
        return []

    def opening(self, session: Session) -> list[str]:
        """Lines about the run, before its first step. On rank 0."""
        return []

    def closing(self, session: Session) -> list[str]:
        """Lines about the run, after its last step or when it is found finished. On rank 0."""
        return []

    def next_commands(self, session: Session) -> dict[str, list[str]]:
        """Commands that go on from a finished run, as lists of arguments by a word for what they do."""
        return {}


def open_checkpoint(folder: Path) -> UnshardedCheckpoint:
    """Open a checkpoint as a run goes on from it. Raises as UnshardedCheckpoint.open."""
    checkpoint = UnshardedCheckpoint.open(folder)
    for extension in extensions():
        checkpoint = extension.view(checkpoint)
    return checkpoint
