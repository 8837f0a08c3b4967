"""TrainingState, the part of a checkpoint besides tensors: a run's progress, and what identifies the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from safetensors.torch import load_file
from torch import Tensor

from model.declared import NonNegativeFloat, NonNegativeInt, declared, from_dict, to_dict
from model.errors import UserError
from pretrain.utils.parsing import read_json

# Tensors that hooks keep from one session to the next, such as the features of the last probe.
FEATURES = "features.safetensors"
OWN_FEATURES = ("growth/", "maturity/")
"""Beginnings of the names of this project's, which are float32; those of others may be of any dtype."""


@declared("records", frozen=False)
class Record:
    """What a hook has noted in a run: JSON that it alone writes, reads and checks."""

    values: dict[str, Any] = field(default_factory=dict)
    needed: bool = False
    """Whether the run cannot continue without the hook. The record of one that is not needed is kept."""


@declared("data")
class DataIdentity:
    """What identifies the data: a run resumes only on the same data."""

    tokenizer: str = ""
    """Hash of the tokenizer; empty if it is not known."""
    data: list[tuple[str, str]] | None = None
    """Content hash and share of every corpus; None for a model that was made elsewhere."""
    validation: list[tuple[str, str]] | None = None
    """The same of the corpora that only serve validation; None if there are none."""


@declared("decided")
class Decided:
    """The decisions of pretrain/run/decisions.py that a run keeps when it is resumed."""

    compile: bool
    fused: Literal["all", "loss", "none"]
    attention: Literal["blocks", "torch"]
    micro_batch: NonNegativeInt
    """Sequences per rank and forward pass."""


@declared("world")
class WorldRecord:
    """What a checkpoint's files, and the bits of its numbers, depend on."""

    ranks: NonNegativeInt = 1
    tensor_parallel: NonNegativeInt = 1
    context_parallel: NonNegativeInt = 1
    stage: NonNegativeInt = 0
    """ZeRO stage."""
    dtype: str = "fp32"
    """bf16 or fp32: what the model computes in."""
    offload: str = "none"
    """Device that the optimizer's state is offloaded to."""
    threads: NonNegativeInt = 1
    """CPU threads per rank."""
    device: str = "cpu"
    hardware: str = ""
    """The first rank's device, in words."""
    versions: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    """Hashes of the code of all sessions so far."""


@dataclass
class _ValidationRead:
    data: str | None = None


@dataclass
class _SettingsRead:
    """The settings of a run that are read without its RunConfig. Others may be those of another version."""

    data: str = ""
    data_root: str = ""
    document_mask: bool = False
    seed: int = 0
    optimizer: dict[str, Any] = field(default_factory=dict)
    validation: _ValidationRead = field(default_factory=_ValidationRead)


def _check_readable(settings: dict[str, Any]) -> dict[str, Any]:
    from_dict(_SettingsRead, settings, section="run")
    return settings


ReadableSettings = Annotated[dict[str, Any], AfterValidator(_check_readable)]


@declared("state", frozen=False)
class TrainingState:
    """Everything but tensors that a run continues from."""

    step: NonNegativeInt = 0
    """Optimizer steps attempted so far."""
    sequences: NonNegativeInt = 0
    """Training sequences consumed so far: where the data continues."""
    tokens: NonNegativeInt = 0
    """Label tokens seen by all ranks so far."""
    seconds: NonNegativeFloat = 0.0
    """Wall-clock seconds spent training, over all sessions."""
    skipped: NonNegativeInt = 0
    """Updates skipped for a non-finite loss or gradient."""
    skipped_in_a_row: NonNegativeInt = 0
    """Updates skipped since the last applied one."""
    spikes: NonNegativeInt = 0
    """Updates skipped for a loss or gradient norm out of line; part of skipped."""
    recent: dict[Literal["losses", "norms"], list[float]] = field(default_factory=dict)
    """Losses and gradient norms that the next one is compared with."""
    pending: list[str] = field(default_factory=list)
    """What was due at this step and not done (validation), because the session was stopped on request."""
    released: dict[str, NonNegativeInt] = field(default_factory=dict)
    """Learning-rate rules that have been released by maturity, with the step of their release."""
    records: dict[str, Record] = field(default_factory=dict)
    """What hooks have noted, by their name."""
    from_seed: bool = True
    """Whether the seed alone gives the weights of step 0: they were not imported, and no head was added or
    removed."""
    imported: bool = False
    """Whether the weights of step 0 come from another model."""
    origin: str = ""
    """Where they come from, as far as it is known: the run with its step, or the folder's name."""
    run: ReadableSettings = field(default_factory=dict)
    """The requested RunConfig; empty for a model that was made elsewhere."""
    decided: Decided | None = None
    """The decisions derived from it; None for a model that was made elsewhere."""
    model: dict[str, Any] = field(default_factory=dict)
    """The ModelConfig."""
    data: DataIdentity = field(default_factory=DataIdentity)
    world: WorldRecord | None = None
    """The parallel configuration that wrote it; None for a checkpoint that no engine wrote."""

    def record(self, name: str) -> dict[str, Any]:
        """What the hook *name* has noted; empty if nothing."""
        return self.records[name].values if name in self.records else {}

    def to_json(self) -> str:
        """The text of state.json."""
        return json.dumps(to_dict(self), indent=1)


def read_state(folder: Path) -> TrainingState:
    """Read a checkpoint's TrainingState.

    Raises:
        UserError: state.json cannot be read, or holds something else.
    """
    path = folder / "state.json"
    if not path.exists():
        raise UserError(
            f"checkpoint: {folder} holds no state.json; give one such as runs/NAME/checkpoints/step_000500"
        )
    return from_dict(TrainingState, read_json(path, "checkpoint"), f"checkpoint: {path}")


def read_features(folder: Path) -> dict[str, Tensor]:
    """The features of the last probes before a checkpoint, by name; empty when there are none.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / FEATURES
    with explain_damage(path):
        features = load_file(path) if path.is_file() else {}
        for name, tensor in features.items():
            if tensor.dtype != torch.float32 and name.startswith(OWN_FEATURES):
                raise TypeError(f"{name} is {tensor.dtype}")
        return features


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged or edited checkpoint file into a one-line UserError. Only reading belongs
    inside.

    No file is trusted: it may hold containers of any shape and type, and not all of them are checked for.

    Raises:
        UserError: it names *path*.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), "")[:160]
        raise UserError(
            f"checkpoint: {path} does not hold what a checkpoint's file holds ({type(error).__name__}: "
            f"{message if message.isprintable() else ascii(message)}); restore it, or continue from an "
            "earlier step"
        ) from error
