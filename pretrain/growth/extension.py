"""Growth as an extension of a run: heads are added and pruned while it trains."""

from __future__ import annotations

from model.config import ModelConfig
from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.state import Record, TrainingState, read_state
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.config.run_config import RunConfig
from pretrain.growth.edit import changed_checkpoint
from pretrain.growth.hook import Growth
from pretrain.growth.models import check_kept_heads, continued_model
from pretrain.growth.record import NAME, GrowthState
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook
from pretrain.run.session import Session


class Growing(Extension):
    """What growth brings to a run."""

    name = NAME

    def varies_heads(self, run: RunConfig) -> bool:
        """In a run that grows, or has grown before."""
        if run.growth.active:
            return True
        steps = checkpoint_steps(run.folder)
        try:
            return bool(steps) and bool(read_state(checkpoint_path(run.folder, steps[-1])).record(NAME))
        except UserError:
            return False  # damaged: said when checkpoints are verified

    def continued_model(
        self, run: RunConfig, asked: ModelConfig, saved: TrainingState
    ) -> tuple[ModelConfig, ModelConfig] | None:
        """See pretrain.growth.models.continued_model."""
        if not (run.growth.active or saved.record(NAME)):
            return None
        models = continued_model(asked, saved)
        check_kept_heads(run, saved, models[1])
        return models

    def view(self, checkpoint: UnshardedCheckpoint) -> UnshardedCheckpoint:
        """The checkpoint after its pending changes."""
        return changed_checkpoint(checkpoint)

    def loaded(self, state: TrainingState) -> None:
        """The engine holds the changed heads: nothing is pending, and the seed alone does not give its
        weights."""
        if state.record(NAME).get("pending"):
            state.record(NAME)["pending"] = []
            state.from_seed = False

    def hooks(self, session: Session) -> list[Hook]:
        """The hook that grows, or keeps what growth knew."""
        if not (session.run.growth.active or session.state.record(NAME)):
            return []
        # Written down before the first check: a run that goes on without growth keeps the heads that it has.
        session.state.records.setdefault(
            NAME, Record(GrowthState.begin(session.model.heads).to_json(), needed=True)
        )
        return [Growth(session)]

    def opening(self, session: Session) -> list[str]:
        """What asks for heads, when, and how far they may go."""
        growth, hook = session.run.growth, session.hook(NAME)
        if not growth.active:
            return []
        when = f"checked every {hook.every} steps up to {hook.last:,}, decided from step {hook.first:,} on"
        if growth.schedule:
            when = f"at steps {', '.join(map(str, sorted(growth.schedule)))}"
        budget = f", {growth.budget} in all" if growth.budget else ""
        return [f"growth   {growth.criterion}: at most {hook.most} heads a layer{budget}; {when}"]
