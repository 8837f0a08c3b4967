"""Checks which settings may change between two sessions of one run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from model.config import ModelConfig
from model.declared import from_dict, to_dict
from model.errors import UserError, escape_controls, quote
from pretrain.checkpoint.state import TrainingState, WorldRecord
from pretrain.config.model_file import split_step
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import diff_settings
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.optim.schedule import LearningRateSchedule
from pretrain.run.hooks import Hook

# Settings whose changes are not noted, since they are harmless (a run's place, logging, length) or checked
# elsewhere.
SILENT = {
    *("name", "init_from", "runs_dir", "data_root", "resume", "recipe"),
    *("logging", "checkpoint", "evaluation"),
    *("interruption", "diagnostics_every", "threads", "model", "heads", "architecture", "seed", "data"),
    *("tokenizer", "vocab_size", "micro_batch", "tensor_parallel", "context_parallel"),
}


# A change of these is allowed, and noted.
SHAPE = ("ranks", "tensor_parallel", "context_parallel", "stage", "offload", "dtype")


IMPORTED = "imported"
"""The recipe of a run whose weights come from elsewhere; see import_folder."""
BEGIN_ANOTHER = "for another run from the same weights give --name OTHER and --init_from with their source"
"""What to do instead of continuing a run whose weights come from elsewhere."""


def check_imported(run: RunConfig) -> None:
    """Reject to begin from scratch a run whose settings are those of an import.

    Raises:
        UserError: they are; it says what keeps the weights.
    """
    source = Path(run.model)
    if run.init_from is None and run.recipe == IMPORTED and source.name == "model.json":
        raise UserError(
            f"name: {run.folder} holds no checkpoint, and would begin without the imported weights of "
            f"{source.parent}; give --init_from {source.parent} to begin with them (--model {source} without "
            "--config trains from scratch)"
        )


def is_imported(saved: TrainingState) -> bool:
    """Whether the weights of a checkpoint come from elsewhere, before the first session or after it."""
    return saved.imported or not saved.run


def settings_to_give(imported: bool) -> str:
    """What to do where settings do not fit a run's checkpoint; a new run would lose imported weights."""
    if imported:
        return f"give the settings it has; {BEGIN_ANOTHER}"
    return "give --name for a new run, or the settings it was started with"


def check_records(saved: TrainingState, hooks: Iterable[Hook]) -> None:
    """Reject a checkpoint with a record that is needed and that no hook reads.

    Raises:
        UserError: it names the record.
    """
    present = {hook.name for hook in hooks}
    for name, record in saved.records.items():
        if record.needed and name not in present:
            raise UserError(
                f"hooks: the checkpoint holds a record of the hook {quote(name)}, which it needs and which "
                "is not here; give --hooks as before"
            )


def describe_layout_change(saved: WorldRecord | None, world: WorldRecord | None) -> str | None:
    """How the parallel configuration differs from the checkpoint's, in a phrase; None when they match.

    Args:
        saved: the checkpoint's ``world``.
        world: the same of the run that continues.
    """
    if saved is None or world is None:
        return "loaded the weights alone, the optimizer starts fresh"
    pairs = {key: (getattr(saved, key), getattr(world, key)) for key in SHAPE}
    changes = [f"{key} {before} -> {now}" for key, (before, now) in pairs.items() if before != now]
    return f"resharded: {', '.join(changes)}" if changes else None


def resets_optimizer(saved: TrainingState, run: RunConfig) -> bool:
    """Whether a checkpoint's optimizer is of another kind, so that only its weights are of use.

    Raises:
        UserError: it is, and ``optimizer.reset`` is not given.
    """
    before = _read_earlier_request(saved).optimizer.kind if saved.run else run.optimizer.kind
    if before != run.optimizer.kind and not run.optimizer.reset:
        raise UserError(
            f"optimizer.kind: {run.folder} was trained with {before}, whose state {run.optimizer.kind} "
            f"cannot take over; give --optimizer.kind {before}, or --optimizer.reset true to keep the "
            "weights and reset the optimizer state"
        )
    return before != run.optimizer.kind


def _is_source(run: RunConfig, origin: str) -> bool:
    """Whether ``init_from`` is where a run's weights of step 0 are from: *origin* is a phrase of
    initial_weights.Source, and empty for an import, whose settings name its own folder."""
    name, step = split_step(str(run.init_from))
    if not origin:
        return os.path.realpath(name) == os.path.realpath(run.folder)
    shown = escape_controls(name)
    begin = f"{shown} at step "
    return origin == shown or (origin.startswith(begin) if step is None else origin == f"{begin}{step:,}")


def _read_earlier_request(saved: TrainingState) -> RunConfig:
    """The settings of the session that wrote a checkpoint.

    Raises:
        UserError: state.json holds something else.
    """
    return from_dict(RunConfig, saved.run, "checkpoint: run in state.json")


def _another_run(run: RunConfig, saved: TrainingState, differences: Sequence[str]) -> UserError:
    valid = settings_to_give(is_imported(saved))
    if (settings := run.folder / "config.yaml").is_file():
        valid += f": --config {settings}"
    return UserError(f"resume: {run.folder} holds another run ({'; '.join(differences)}); {valid}")


def compare_data_names(saved: TrainingState, run: RunConfig) -> None:
    """Compare the data that a checkpoint's run names with those of the run that is to continue it, before the
    built-in corpus is prepared for nothing.

    Raises:
        UserError: the run asks for the built-in corpus, the checkpoint's run for another one.
    """
    if saved.run and run.data == "builtin" != (before := _read_earlier_request(saved).data):
        raise _another_run(run, saved, [f"data: {before} != builtin"])


def check_resume(
    saved: TrainingState,
    state: TrainingState,
    run: RunConfig,
    held: ModelConfig,
    tokenizers: tuple[Path, Tokenizer] | None = None,
) -> list[str]:
    """Compare a checkpoint with the run that is to continue from it.

    Args:
        saved: the checkpoint's state.
        state: the state with which this session would begin.
        held: the model that the checkpoint must hold.
        tokenizers: folder of the checkpoint's tokenizer, and the run's tokenizer; compared if the hashes
            differ.

    Returns:
        A line for each setting that has changed and may change.

    Raises:
        UserError: another model, tokenizer, data, seed, document mask or choice of decayed parameters (all
            differences named).
    """
    differences = ModelConfig.from_json(saved.model).difference(held)
    if saved.run:
        asked = _read_earlier_request(saved)
        old, new = asked.optimizer, run.optimizer
        for name, earlier, later in (
            ("init_from", asked.init_from, run.init_from or asked.init_from),
            ("seed", asked.seed, run.seed),
            ("optimizer.decay_embeddings", old.decay_embeddings, new.decay_embeddings),
            ("document_mask", asked.document_mask, run.document_mask),  # in effect another model
        ):
            differences += [f"{name}: {earlier} != {later}"] if earlier != later else []
    elif run.init_from is not None and not _is_source(run, saved.origin):
        differences.append(f"init_from: {saved.origin or 'an import'} != {run.init_from}")
    for key in ("tokenizer", "data", "validation"):
        before, now = getattr(saved.data, key), getattr(state.data, key)
        if not before or before == now:  # an imported model knows its tokenizer, not the data
            continue
        difference: str | None = f"{before} != {now}"
        if key == "data" and saved.run and asked.data != run.data:
            difference = f"{asked.data} != {run.data}"
        if key == "validation" and saved.run and asked.validation.data != run.validation.data:
            difference = f"{asked.validation.data} != {run.validation.data}"
        if key == "tokenizer" and tokenizers and tokenizers[0].is_dir():
            difference = tokenizer_difference(load_tokenizer(tokenizers[0]), tokenizers[1])
        differences += [f"{key}: {difference}"] if difference else []
    if differences:
        raise _another_run(run, saved, differences)
    resharded = [describe_layout_change(saved.world, state.world)]
    if resets_optimizer(saved, run):
        resharded.append("the optimizer state is reset, the weights are kept")
    return [change for change in resharded if change] + _notes(saved, state, run)


def describe_rate_change(earlier: RunConfig, run: RunConfig, step: int) -> list[str]:
    """A line if the base learning rate of the next step is not the one that the last session would have used.

    Args:
        step: how many steps were trained.
    """
    if step == 0 or step >= run.steps:
        return []

    def rate(settings: RunConfig, at: int) -> float:
        at = min(at, settings.steps - 1)  # a finished run ends with the rate of its last step
        return settings.optimizer.learning_rate * LearningRateSchedule(
            settings.schedule, settings.steps
        ).factor(at)

    before, planned, now = rate(earlier, step - 1), rate(earlier, step), rate(run, step)
    if math.isclose(planned, now, rel_tol=1e-3):
        return []
    return [
        f"learning rate: {before:.2e} at step {step:,}, {now:.2e} at step {step + 1:,} (--plot_lr draws it)"
    ]


def _notes(saved: TrainingState, state: TrainingState, run: RunConfig) -> list[str]:
    earlier = _read_earlier_request(saved) if saved.run else run
    notes = [
        f"{name} changed: {before} -> {now}"
        for name, (before, now) in diff_settings(earlier, run).items()
        if name.split(".")[0] not in SILENT
    ]
    notes += describe_rate_change(earlier, run, saved.step)
    before, now = to_dict(saved.world) if saved.world else {}, to_dict(state.world)
    notes += [
        f"{key} changed: {before[key]} -> {now[key]}; numbers are no longer bit-identical"
        for key in ("threads", "device", "versions")
        if before and before[key] != now[key]
    ]
    return notes
