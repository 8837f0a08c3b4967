"""What a checkpoint holds beside tensors: where a run stands, and what identifies it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FORMAT = 1
ENGINE_FOLDER = "deepspeed"
# What DeepSpeed's ds_to_universal makes of it, when somebody runs that.
UNIVERSAL_FOLDER = "universal"
# Features of the last probes, for runs that make some.
FEATURES = "features.safetensors"


@dataclass
class TrainingState:
    """Everything but tensors that a run continues from."""

    step: int = 0
    """Optimizer steps attempted so far."""
    sequences: int = 0
    """Training sequences consumed so far: where the data goes on."""
    tokens: int = 0
    """Label tokens seen by all ranks so far."""
    seconds: float = 0.0
    """Wall-clock seconds spent training, over all sessions."""
    skipped: int = 0
    """Updates skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """The same, since the last applied update."""
    spikes: int = 0
    """Updates skipped for a loss or gradient norm out of line; part of skipped."""
    recent: dict[str, list[float]] = field(default_factory=dict)
    """Losses and gradient norms that the next one is compared with."""
    owed: list[str] = field(default_factory=list)
    """What was due at this step and not done (validation), because the session was asked to stop."""
    released: dict[str, int] = field(default_factory=dict)
    """Learning-rate rules that were released by maturity, with the step from which they were."""
    maturity: dict[str, Any] = field(default_factory=dict)
    """What the probes of pretrain/diagnostics/maturity.py have found so far."""
    from_seed: bool = True
    """Whether the weights of step 0 were drawn from the seed, and not made elsewhere."""
    micro_batch: int = 0
    """Sequences per rank and forward pass."""
    run: dict[str, Any] = field(default_factory=dict)
    """The RunConfig."""
    model: dict[str, Any] = field(default_factory=dict)
    """The ModelConfig."""
    data: dict[str, Any] = field(default_factory=dict)
    """What identifies the data: corpora with hashes and weights, tokenizer hash."""
    world: dict[str, Any] = field(default_factory=dict)
    """World.record(), with ZeRO stage and dtype."""


def has_engine_files(folder: Path) -> bool:
    """Whether a checkpoint holds an engine's own files, not only unsharded tensors."""
    return (folder / ENGINE_FOLDER).is_dir()


def read_state(folder: Path) -> TrainingState:
    """Read a checkpoint's TrainingState."""
    return TrainingState(**json.loads((folder / "state.json").read_text(encoding="utf-8")))


def read_features(folder: Path) -> dict[str, Tensor]:
    """The features of the last probes before a checkpoint, by name; empty when there are none."""
    path = folder / FEATURES
    return load_file(path) if path.is_file() else {}
