"""The model that a growing run begins with, continues with, and may grow to."""

from __future__ import annotations

from model.config import ModelConfig
from model.errors import UserError, shown
from model.heads import format_heads
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.growth.edit import changed_model, pending_changes
from pretrain.growth.record import NAME
from pretrain.growth.settings import check_head_dim


def continued_model(run_model: ModelConfig, saved: TrainingState) -> tuple[ModelConfig, ModelConfig]:
    """The model that a checkpoint must hold, and the one that the run goes on with.

    A run whose heads grew keeps them, with growth or without. A run of fixed heads that goes on with growth
    keeps those that it has. Everything else is as in *run_model*.

    Args:
        run_model: what the run's configuration describes.
        saved: the checkpoint's state; of a new run one without a model.

    Raises:
        UserError: the checkpoint's model or its pending changes cannot be read.
    """
    if not saved.model:
        return run_model, run_model
    model = ModelConfig.from_json(saved.model)
    if model.num_layers != run_model.num_layers:
        return run_model, run_model  # another run, which check_resume refuses
    if not saved.record(NAME):
        if model.kv_heads not in (None, model.heads):
            return run_model, run_model  # the same: growth is not for grouped queries
        # The width of a head stays as it is, and must be written down before their number changes.
        fixed = run_model.replace(heads=model.heads, head_dim=model.head_dim)
        return fixed.replace(kv_heads=model.kv_heads), _with_head_dims(fixed)
    now = run_model.replace(heads=model.heads, head_dim=model.head_dim, kv_heads=model.kv_heads)
    return now, changed_model(now, pending_changes(saved))


def check_kept_heads(run: RunConfig, saved: TrainingState, model: ModelConfig) -> None:
    """Refuse head settings that were changed since the last session of a run whose heads are those of its
    checkpoint.

    Args:
        saved: the checkpoint's state.
        model: what the run goes on with.

    Raises:
        UserError: ``heads``, or one of the architecture's, asks for something else than *model* has.
    """
    if not saved.model or not saved.run:
        return  # new or imported
    asked = run.fixed_model_config()
    if asked.num_layers != model.num_layers:
        return  # another run, which check_resume refuses
    now, before = run.to_dict(), saved.run
    asked, model = _with_head_dims(asked), _with_head_dims(model)
    for name in ("heads", "head_dim", "kv_heads"):
        if (getattr(asked, name) or asked.heads) == (getattr(model, name) or model.heads):
            continue
        for field, new, old in (
            (name, now, before),
            (f"architecture.{name}", now["architecture"], before["architecture"]),
        ):
            if new.get(name) not in (None, old.get(name)):
                kept = f"{format_heads(model.heads)} of width {format_heads(model.head_dim or ())}"
                raise UserError(
                    f"{field}: {shown(new[name])} is not what the run has: it keeps its heads, {kept}; leave "
                    "it out, or give --name for a new run"
                )


def _with_head_dims(model: ModelConfig) -> ModelConfig:
    """The same model, with the width of every layer's heads written down."""
    return model.replace(head_dim=tuple(model.layer_head_dim(layer) for layer in range(model.num_layers)))


def check_widths(run: RunConfig, model: ModelConfig) -> None:
    """Refuse a model that cannot go on growing.

    Raises:
        UserError: the heads have another width than ``growth.head_dim``, or one that t does not divide.
    """
    growth = run.growth
    if not growth.active:
        return
    for layer in range(model.num_layers):
        head_dim = model.layer_head_dim(layer)
        if growth.head_dim not in (None, head_dim):
            raise UserError(
                f"growth.head_dim: {growth.head_dim} is not the width {head_dim} that the heads of layer "
                f"{layer} have; leave it out"
            )
        check_head_dim(head_dim, run.tensor_parallel)


def check_every_split(run: RunConfig, model: ModelConfig, micro_batch: int) -> None:
    """Check that the ranks can share the heads of a micro-batch at every head count of a growing run.

    Raises:
        UserError: it names the micro-batches that would do.
    """
    t = run.tensor_parallel
    if micro_batch % t and model.context_length % (2 * t):
        raise UserError(
            f"micro_batch: {micro_batch} sequences of {model.context_length} tokens cannot be shared by {t} "
            f"ranks at every head count of a run that grows; give a multiple of {t}, or a context_length "
            f"that is one of {2 * t}"
        )
