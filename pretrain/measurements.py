"""What a run measures every so many steps and at its last, without a trace in the training numbers.

A measurement can be abandoned when the session is asked to stop; it is then owed, and done when the run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.engine.batch import BatchPlan
from pretrain.evaluation.validation import Validation, ValidationResult
from pretrain.metrics.session import Metrics
from pretrain.metrics.step_log import StepLog
from pretrain.run.data import RunData
from pretrain.runtime.control import Abandoned, Control
from pretrain.runtime.world import World

if TYPE_CHECKING:
    from pretrain.evaluation.in_loop import InLoopEvaluation


class Measurements:
    """The measurements of a run, in the order in which they are done.

    Args:
        plan: its micro-batch fits into memory, here as in training.
        diagnostics: the run's.

    Raises:
        UserError: on every rank, for tasks of an evaluation that cannot be run.
    """

    def __init__(
        self,
        run: RunConfig,
        model_config: ModelConfig,
        data: RunData,
        plan: BatchPlan,
        world: World,
        diagnostics: Diagnostics,
    ) -> None:
        self.result: ValidationResult | None = None
        """The newest validation's."""
        self.validation: Validation | None = None
        self.evaluation: InLoopEvaluation | None = None
        self.diagnostics = diagnostics
        self._steps = run.steps
        self._intervals: dict[str, int] = {}
        T = model_config.context_length
        if run.validation.every:
            self._intervals["validation"] = run.validation.every
            windows, label_bytes = data.validation_windows(T, run.validation.sequences)
            documents = data.validation_documents(T, run.validation.sequences) if run.document_mask else None
            self.validation = Validation(windows, label_bytes, plan.micro_batch, world, documents)
        if run.evaluation.every:
            from pretrain.evaluation.in_loop import InLoopEvaluation  # lm-eval takes seconds to import

            self._intervals["evaluation"] = run.evaluation.every
            self.evaluation = InLoopEvaluation(run.evaluation, data.tokenizer, T, plan.micro_batch * T, world)

    def due(self, step: int) -> list[str]:
        """What is to be done after this step."""
        names = [name for name, every in self._intervals.items() if step >= self._steps or step % every == 0]
        return [*names, "diagnostics"] if self.diagnostics.due(step) else names

    def run(self, engine: Any, state: TrainingState, metrics: Metrics, log: StepLog, control: Control) -> int:
        """Do what is owed at this step; what is done is no longer owed. Collective.

        Returns:
            0, or the exit code of a request to stop that came in the middle; the rest stays owed.
        """
        while state.owed:
            name = state.owed[0]
            try:
                with control.interruptible(engine, f"{name} at step {state.step}"):
                    self._measure(name, engine, state, metrics, log)
            except Abandoned as abandoned:
                return abandoned.code
            state.owed = state.owed[1:]
        return 0

    def _measure(self, name: str, engine: Any, state: TrainingState, metrics: Metrics, log: StepLog) -> None:
        """One measurement; one that a later session has turned off is left out."""
        if name == "validation" and self.validation:
            with metrics.pause():
                self.result = self.validation.run(engine)
            log.flush({"val_loss": self.result.loss, "val_bpb": self.result.bpb})
        if name == "evaluation" and self.evaluation:
            log.flush()
            with metrics.pause():
                scores = self.evaluation.run(engine)
            metrics.log(state.step, scores.figures)
            metrics.message(f"scores   step {state.step:,}: {scores}")
        if name == "diagnostics" and self.diagnostics.due(state.step):
            log.flush()
            with metrics.pause():
                figures = self.diagnostics.measure(engine, state)
            metrics.log(state.step, figures)
