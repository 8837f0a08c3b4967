"""Zero-shot evaluation as an extension of a run."""

from __future__ import annotations

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.evaluation.checks import check_tasks, existing_data_dir
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook
from pretrain.run.session import Session
from pretrain.runtime.environment import environment_rank
from pretrain.utils.extras import check_installed


class Evaluation(Extension):
    """What evaluation brings to a run."""

    name = "evaluation"

    def check(self, run: RunConfig) -> None:
        """Refuse unknown tasks and folders that are missing. The first rank reads lm-eval's files for all."""
        settings = run.evaluation
        if not settings.every or environment_rank():
            return
        check_installed("lm_eval", "evaluation.every")
        try:
            check_tasks(settings.tasks, settings.include_path)
            existing_data_dir(settings.data_dir)
        except UserError as error:
            raise UserError(f"evaluation.{error}") from None  # its fields are those of the command

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
