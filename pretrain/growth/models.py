"""The model that a growing run begins with, continues with, and may grow to."""

from __future__ import annotations

from model import parallel_plan
from model.config import ModelConfig
from model.context_plan import head_rank_numbers
from model.errors import UserError, divisors, quote
from model.heads import format_heads
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.state import TrainingState, read_state
from pretrain.config.growth import check_head_dim
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import growing_multiple
from pretrain.growth.edit import apply_changes, pending_changes
from pretrain.growth.record import NAME
from pretrain.run.resume import is_imported, settings_to_give

HEADS = ("heads", "head_dim", "kv_heads")


def may_change_heads(run: RunConfig) -> bool:
    """Whether head counts may change while the run trains: it grows, or has grown before."""
    if run.growth.active:
        return True
    steps = checkpoint_steps(run.folder)
    if not steps:  # a mirror may hold a run that has grown
        return run.checkpoint.mirror is not None
    try:
        return bool(read_state(checkpoint_path(run.folder, steps[-1])).record(NAME))
    except UserError:
        return True  # damaged: an older one that takes its place may have any head counts


def head_group_sizes(run: RunConfig) -> set[int]:
    """How many ranks may share heads at any time of the run; see model.parallel_plan.head_group_sizes."""
    t = run.tensor_parallel
    if t > 1 and may_change_heads(run):
        return {size for size in range(1, t + 1) if t % size == 0}
    return parallel_plan.head_group_sizes(run.build_model_config(), t)


def context_head_ranks(run: RunConfig) -> set[int]:
    """How many context ranks may exchange heads at any time of the run; see
    model.context_plan.head_rank_numbers."""
    c = run.context_parallel
    if c > 1 and may_change_heads(run):
        return set(divisors(c))
    return head_rank_numbers(run.build_model_config(), c, run.tensor_parallel)


def continue_model(
    run: RunConfig, asked: ModelConfig, saved: TrainingState
) -> tuple[ModelConfig, ModelConfig]:
    """The model that a checkpoint must hold, and the one that the run continues with.

    Args:
        asked: what the run's configuration describes.
        saved: the checkpoint's state; of a new run one without a model.

    Raises:
        UserError: as choose_models and check_kept_heads.
    """
    if not (run.growth.active or saved.record(NAME)):
        return asked, asked
    models = choose_models(asked, saved)
    if run.growth.active:
        run.growth.check_attention(models[1])
    check_kept_heads(run, saved, models[1])
    return models


def choose_models(run_model: ModelConfig, saved: TrainingState) -> tuple[ModelConfig, ModelConfig]:
    """continue_model of a run that grows, or has grown.

    A run whose heads grew keeps them, with growth or without. A run of fixed heads that continues with growth
    keeps its heads. Everything else is as in *run_model*.

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
        return run_model, run_model  # another run, which check_resume rejects
    if not saved.record(NAME):
        if model.kv_heads not in (None, model.heads):
            return run_model, run_model  # the same: growth is not for grouped queries
        # The width of a head stays as it is, and must be written down before their number changes.
        fixed = run_model.replace(heads=model.heads, head_dim=model.head_dim)
        return fixed.replace(kv_heads=model.kv_heads), fixed.replace(head_dim=_head_dims(fixed))
    now = run_model.replace(heads=model.heads, head_dim=model.head_dim, kv_heads=model.kv_heads)
    return now, apply_changes(now, pending_changes(saved))


def check_kept_heads(run: RunConfig, saved: TrainingState, model: ModelConfig) -> None:
    """Reject what was not asked for in the last session of a run whose heads are those of its checkpoint.

    Args:
        saved: the checkpoint's state; of a new or imported run one without settings.
        model: what the run continues with.

    Raises:
        UserError: a setting of heads was changed, or t does not divide the width of the heads that grow.
    """
    widths = _head_dims(model)
    if saved.run:
        held = {"heads": _spellings(model.heads), "head_dim": _spellings(widths)}
        for section, names in {"": HEADS, "architecture": HEADS, "growth": ("head_dim",)}.items():
            now, before = (each.get(section, {}) if section else each for each in (run.to_dict(), saved.run))
            for name in names:
                if now.get(name) not in (None, before.get(name), *held.get(name, ())):
                    kept = f"{format_heads(model.heads)} of width {format_heads(widths)}"
                    raise UserError(
                        f"{f'{section}.{name}'.lstrip('.')}: {quote(now[name])} is new, and the run keeps "
                        f"its heads, {kept}; leave it out (--model {run.folder} is the run's own), or "
                        f"{settings_to_give(is_imported(saved))}"
                    )
    if run.growth.active:
        for head_dim in widths:
            check_head_dim(head_dim, run.tensor_parallel)


def _spellings(values: tuple[int, ...]) -> list[object]:
    """How settings may say these values of all layers."""
    equal = [values[0], [values[0]]] if len(set(values)) == 1 else []
    return [format_heads(values), list(values), *equal]


def _head_dims(model: ModelConfig) -> tuple[int, ...]:
    """The width of every layer's heads."""
    return tuple(model.layer_head_dim(layer) for layer in range(model.num_layers))


def check_every_split(run: RunConfig, model: ModelConfig, micro_batch: int) -> None:
    """Check that the ranks can share the heads of a micro-batch at every head count of a growing run.

    Raises:
        UserError: it names the micro-batches that would do.
    """
    t, length = run.tensor_parallel, model.context_length // run.context_parallel
    if micro_batch % growing_multiple(model, t, run.context_parallel):
        raise UserError(
            f"micro_batch: {micro_batch} sequences of {length} tokens cannot be shared by {t} "
            f"ranks at every head count of a run that grows; give a multiple of {t}, or a context_length "
            f"that is one of {2 * t * run.context_parallel}"
        )
