"""A hook that remembers the best validation loss of a run, from one session to the next.

    head-schedules train --config micro --name best --hooks examples.best_loss:BestLoss

Or in a program: ``train(run, hooks=[BestLoss])``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.declared import NonNegativeInt, declared, from_dict, to_dict
from pretrain import HookResult, IntervalHook, Record, Session, TrainingState


@declared("best_loss")
class Best:
    """The record, kept in every checkpoint."""

    loss: float = 1e9
    step: NonNegativeInt = 0


class BestLoss(IntervalHook):
    """Compares each validation with the best one so far."""

    name = "best_loss"

    def __init__(self, session: Session) -> None:
        super().__init__(session.run.validation.every, session.run.steps)

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        best, loss = from_dict(Best, state.record(self.name), self.name), row["val_loss"]
        if not loss < best.loss:  # also one that is not a number
            return HookResult()
        state.records[self.name] = Record(to_dict(Best(loss, state.step)))
        return HookResult({"best_loss": loss}, [f"best     {loss:.4f} at step {state.step:,}"])

    def summarize(self, session: Session) -> list[str]:
        best = from_dict(Best, session.state.record(self.name), self.name)
        if not best.step:  # nothing was validated
            return []
        return [f"best     validation loss {best.loss:.4f}, after step {best.step:,}"]
