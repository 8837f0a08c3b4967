"""Zero-shot evaluation as an extension of a run."""

from __future__ import annotations

from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook
from pretrain.run.session import Session


class Evaluation(Extension):
    """What evaluation brings to a run."""

    name = "evaluation"

    def hooks(self, session: Session) -> list[Hook]:
        """The hook that scores, if the run asks for it."""
        if not session.run.evaluation.every:
            return []
        from pretrain.evaluation.in_loop import EvaluationHook  # lm-eval takes seconds to import

        return [EvaluationHook(session)]

    def next_commands(self, session: Session) -> dict[str, list[str]]:
        """How to score the finished run."""
        if not session.data.is_text:
            return {}
        return {"evaluate": ["pretrain.evaluation", str(session.run.folder), "--tasks", "hellaswag,piqa"]}
