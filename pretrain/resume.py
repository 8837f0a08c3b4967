"""What may change between two sessions of one run, and what may not."""

from __future__ import annotations

from typing import Any

from model.config import ModelConfig
from model.errors import UserError
from pretrain.checkpoint import TrainingState
from pretrain.config import RunConfig

# Where a run lives, how it is shown and how long it goes on may differ without a word.
SILENT = {
    "name",
    "runs_dir",
    "data_root",
    "resume",
    "recipe",
    "logging",
    "checkpoint",
    "threads",
    "model",
    "heads",
    "architecture",
    "seed",
    "data",
    "vocab_size",
    "micro_batch",
    "tensor_parallel",
}


def check_resume(
    saved: TrainingState, run: RunConfig, model: ModelConfig, data: dict[str, Any], world: dict[str, Any]
) -> list[str]:
    """Compare a checkpoint with the run that wants to continue from it.

    Returns:
        A line for each setting that changed and may.

    Raises:
        UserError: another model, tokenizer, data or seed (all differences named), or another shape of the world.
    """
    refused = ModelConfig.from_json(saved.model).difference(model)
    if saved.run["seed"] != run.seed:
        refused.append(f"seed: {saved.run['seed']} != {run.seed}")
    refused += [
        f"{key}: {saved.data.get(key)} != {value}"
        for key, value in data.items()
        if saved.data.get(key) != value
    ]
    if refused:
        raise UserError(
            f"resume: {run.folder} holds another run ({'; '.join(refused)}); give --name for a new run, "
            "or the settings it was started with"
        )
    keys = ("ranks", "tensor_parallel", "stage", "offload", "dtype")
    old_world = {"tensor_parallel": 1} | saved.world  # early checkpoints do not say
    shape = {key: (old_world.get(key), world[key]) for key in keys}
    changed = [f"{key}: {old} != {new}" for key, (old, new) in shape.items() if old != new]
    if changed:
        raise UserError(
            f"resume: the checkpoint in {run.folder} was written by another world ({'; '.join(changed)}); "
            "continue with the same number of ranks, tensor_parallel, ZeRO stage, offloading and dtype"
        )
    return _notes(saved, run, world)


def _notes(saved: TrainingState, run: RunConfig, world: dict[str, Any]) -> list[str]:
    notes = []
    for key, value in run.to_dict().items():
        old = saved.run.get(key)
        if key not in SILENT and old != value:
            notes.append(f"{key} changed: {old} -> {value}")
    for key in ("threads", "device", "versions"):
        if saved.world.get(key) != world[key]:
            notes.append(
                f"{key} changed: {saved.world.get(key)} -> {world[key]}; numbers are no longer bit-identical"
            )
    return notes
