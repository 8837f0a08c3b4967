"""What best_loss does in a run."""

from __future__ import annotations

from typing import Any

from model.declared import Count, declared, from_plain, to_plain
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook, HookResult
from pretrain.run.session import Session

NAME = "best_loss"


@declared(NAME)
class Best:
    """The record, kept in every checkpoint."""

    loss: float = 1e9
    step: Count = 0


class BestLossHook(Hook):
    """Compares each validation with the best one so far."""

    name = NAME

    def __init__(self, session: Session) -> None:
        self.session = session

    def due(self, step: int) -> bool:
        """After each validation."""
        return self.session.hook("validation").due(step)

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Note a better loss; the figure goes to metrics.jsonl."""
        best, loss = from_plain(Best, state.record(NAME), NAME), self.session.hook("validation").result.loss
        if loss >= best.loss - self.session.run.best_loss_margin:
            return HookResult()
        state.records[NAME] = Record(to_plain(Best(loss, state.step)))
        return HookResult({"best_loss": loss}, [f"best     {loss:.4f} at step {state.step:,}"])

    def closing(self, session: Session) -> list[str]:
        """The best of all sessions."""
        best = from_plain(Best, session.state.record(NAME), NAME)
        return [f"best     validation loss {best.loss:.4f}, after step {best.step:,}"]


class BestLoss(Extension):
    """What best_loss brings to a run."""

    name = NAME

    def hooks(self, session: Session) -> list[Hook]:
        """The hook, where it is asked for and there is a validation."""
        wanted = session.run.best_loss and session.hook("validation")
        return [BestLossHook(session)] if wanted else []
