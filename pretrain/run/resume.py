"""Checks which settings may change between two sessions of one run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.optim.groups import run_groups

# Settings whose changes are not noted, since they are harmless (a run's place, logging, length) or checked elsewhere.
SILENT = {
    "name",
    "runs_dir",
    "data_root",
    "resume",
    "recipe",
    "logging",
    "checkpoint",
    "evaluation",
    "interruption",
    "diagnostics_every",
    "threads",
    "model",
    "heads",
    "architecture",
    "seed",
    "data",
    "tokenizer",
    "vocab_size",
    "micro_batch",
    "tensor_parallel",
}


# What the files of a checkpoint depend on. A change is allowed: the checkpoint is reshaped.
SHAPE = ("ranks", "tensor_parallel", "stage", "offload", "dtype", "partitioning")
# What worlds recorded before these keys existed.
SHAPE_DEFAULTS = {"tensor_parallel": 1, "partitioning": {}}


def shape_change(saved: dict[str, Any], world: dict[str, Any]) -> str | None:
    """How the world differs from the one that wrote a checkpoint, in a phrase; None when they match.

    Args:
        saved: the checkpoint's ``world``.
        world: the same of the run that continues.
    """
    if not saved:
        return "loaded from a checkpoint that no engine wrote"
    old = {key: saved.get(key, SHAPE_DEFAULTS.get(key)) for key in SHAPE}
    new = {key: world.get(key, SHAPE_DEFAULTS.get(key)) for key in SHAPE}
    if old == new:
        return None
    return f"reshaped from {_shape(old)} to {_shape(new)}"


def regrouped(saved: TrainingState, run: RunConfig, model: ModelConfig) -> str | None:
    """How the optimizer's groups differ from those of a checkpoint, in a phrase; None when they are the same.

    DeepSpeed pairs groups by position, unchecked; a checkpoint with other groups is read parameter by parameter.
    """
    if not saved.run:
        return None  # no engine has written it: it is read parameter by parameter anyway
    before = dataclasses.replace(
        run,
        lr_rules=saved.run.get("lr_rules", []),
        optimizer=dataclasses.replace(
            run.optimizer,
            decay_embeddings=saved.run.get("optimizer", {}).get(
                "decay_embeddings", run.optimizer.decay_embeddings
            ),
        ),
    )
    old, new = ({g.name: g.parameters for g in run_groups(config, model)} for config in (before, run))
    if list(old.items()) == list(new.items()):
        return None
    return f"optimizer groups changed from {', '.join(old)} to {', '.join(new)}"


def _shape(shape: dict[str, Any]) -> str:
    ranks = shape["ranks"]
    parts = [f"{ranks} rank{'s' * (ranks != 1)}"]
    if shape["tensor_parallel"] != 1:
        parts[0] += f" ({shape['tensor_parallel']} tensor-parallel)"
    parts += [f"ZeRO {shape['stage']}", str(shape["dtype"])]
    if shape["offload"] not in (None, "none"):
        parts.append(f"offloaded to {shape['offload']}")
    parts += [f"{key} {value}" for key, value in sorted(shape["partitioning"].items())]
    return ", ".join(parts)


def check_resume(
    saved: TrainingState,
    run: RunConfig,
    model: ModelConfig,
    data: dict[str, Any],
    world: dict[str, Any],
    tokenizers: tuple[Path, Tokenizer] | None = None,
) -> list[str]:
    """Compare a checkpoint with the run that is to continue from it.

    Args:
        saved: the checkpoint's state.
        data: RunData.fingerprint of the run.
        world: the same as ``saved.world``, of the run.
        tokenizers: folder of the checkpoint's tokenizer, and the run's tokenizer; compared if the hashes differ.

    Returns:
        A line for each setting that has changed and may change.

    Raises:
        UserError: another model, tokenizer, data, seed, document mask or choice of decayed parameters (all differences
            named).
    """
    differences = ModelConfig.from_json(saved.model).difference(model)
    if saved.run.get("seed", run.seed) != run.seed:
        differences.append(f"seed: {saved.run['seed']} != {run.seed}")
    # It decides which optimizer group a parameter is in, and DeepSpeed pairs groups by position, unchecked.
    saved_decay = saved.run.get("optimizer", {}).get("decay_embeddings", run.optimizer.decay_embeddings)
    if saved_decay != run.optimizer.decay_embeddings:
        differences.append(f"optimizer.decay_embeddings: {saved_decay} != {run.optimizer.decay_embeddings}")
    # In effect another model; runs from before the option, and imported ones, have no such entry.
    saved_mask = saved.run.get("document_mask", False if saved.run else run.document_mask)
    if saved_mask != run.document_mask:
        differences.append(f"document_mask: {saved_mask} != {run.document_mask}")
    for key, value in data.items():
        before = saved.data.get(key, value)  # an imported model knows its tokenizer, not the data
        difference = None if before == value else f"{before} != {value}"
        if difference and key == "tokenizer" and tokenizers and tokenizers[0].is_dir():
            difference = tokenizer_difference(load_tokenizer(tokenizers[0]), tokenizers[1])
        differences += [f"{key}: {difference}"] if difference else []
    if differences:
        raise UserError(
            f"resume: {run.folder} holds another run ({'; '.join(differences)}); give --name for a new run, "
            "or the settings it was started with"
        )
    reshaped = [shape_change(saved.world, world), regrouped(saved, run, model)]
    return [change for change in reshaped if change] + _notes(saved, run, world)


def _notes(saved: TrainingState, run: RunConfig, world: dict[str, Any]) -> list[str]:
    notes = []
    for key, value in run.to_dict().items():
        if isinstance(value, dict) and isinstance(before := saved.run.get(key), dict):
            # A setting that is newer than the checkpoint, and not given, is not a change.
            value = {name: new for name, new in value.items() if name in before or new is not None}
        if key not in SILENT and key in saved.run and saved.run[key] != value:
            notes.append(f"{key} changed: {saved.run[key]} -> {value}")
    for key in ("threads", "device", "versions"):
        if saved.world and saved.world.get(key) != world[key]:
            notes.append(
                f"{key} changed: {saved.world.get(key)} -> {world[key]}; numbers are no longer bit-identical"
            )
    return notes
