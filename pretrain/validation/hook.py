"""Validation as a hook of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.state import TrainingState
from pretrain.run.hooks import HookResult, IntervalHook
from pretrain.utils.format import log_line
from pretrain.validation.loss import Validation, ValidationResult, compare_baselines

if TYPE_CHECKING:
    from pretrain.run.session import Session


class ValidationHook(IntervalHook):
    """Loss on the run's held-out windows, every ``validation.every`` steps and at the last."""

    name = "validation"

    def __init__(self, session: Session) -> None:
        run, count = session.run, session.run.validation.sequences
        self._validation = Validation(
            session.validation_windows(count),
            session.validation_bytes(count),
            session.batch.micro_batch,
            session.world,
            session.validation_documents(count) if run.document_mask else None,
        )
        super().__init__(run.validation.every, run.steps)
        self.result: ValidationResult | None = None
        """The newest result of this session."""

    def announce(self, session: Session) -> list[str]:
        """A note where the held-out text has fewer windows than the run asks for."""
        asked, data = session.run.validation.sequences, session.data
        count = self._validation.batches.count
        shares = len(data.validation or data.corpora)  # each is rounded to whole windows
        if asked - count <= shares / 2:
            return []
        note = f"validation on {count:,} windows: the held-out text has no more"
        return [log_line("note", f"{note} (validation.sequences: {asked:,})")]

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Return ``val_loss`` in nats per token, ``val_bpb`` in bits per byte."""
        self.result = self._validation.run(engine)
        return HookResult({"val_loss": self.result.loss, "val_bpb": self.result.bpb})

    def summarize(self, session: Session) -> list[str]:
        """The newest result, and what needs no model on the same windows."""
        if self.result is None:
            return []
        count = session.run.validation.sequences
        others = compare_baselines(session.data, session.model_config.context_length, count)
        return [
            log_line(
                "result",
                f"validation loss {self.result.loss:.4f} nats per token, {self.result.bpb:.4f} bits per byte",
            ),
            log_line(
                "compare", f"bits per byte of the same windows: the model {self.result.bpb:.4f}, {others}"
            ),
        ]
