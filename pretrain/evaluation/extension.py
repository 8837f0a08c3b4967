"""Zero-shot evaluation as an extension of a run."""

from __future__ import annotations

from typing import Any

from pretrain.checkpoint.state import TrainingState
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook, HookResult, IntervalHook
from pretrain.run.session import Session
from pretrain.utils.text import labelled


class EvaluationHook(IntervalHook):
    """Zero-shot scores through lm-eval, every ``evaluation.every`` steps and at the last.

    Raises:
        UserError: on every rank, for tasks that cannot be run.
    """

    name = "evaluation"

    def __init__(self, session: Session) -> None:
        from pretrain.evaluation.in_loop import InLoopEvaluation  # lm-eval takes seconds to import

        run, T = session.run, session.model.context_length
        self._evaluation = InLoopEvaluation(
            run.evaluation, session.data.tokenizer, T, session.batch.micro_batch * T, session.world
        )
        super().__init__(run.evaluation.every, run.steps)

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Return ``evaluation/TASK/METRIC`` of each task, and a line with them."""
        scores = self._evaluation.run(engine)
        return HookResult(scores.figures, [labelled("scores", f"step {state.step:,}: {scores}")])


class Evaluation(Extension):
    """What evaluation brings to a run."""

    name = "evaluation"

    def hooks(self, session: Session) -> list[Hook]:
        """The hook that scores, if the run asks for it."""
        return [EvaluationHook(session)] if session.run.evaluation.every else []

    def next_commands(self, session: Session) -> dict[str, list[str]]:
        """How to score the finished run."""
        if not session.data.is_text:
            return {}
        return {"evaluate": ["pretrain.evaluation", str(session.run.folder), "--tasks", "hellaswag,piqa"]}
