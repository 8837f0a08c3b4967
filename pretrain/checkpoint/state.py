"""TrainingState, the part of a checkpoint besides tensors: a run's progress, and what identifies the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.errors import UserError, shown
from model.parsing import LARGEST_INTEGER

FORMAT = 1
MOST_THREADS = 1 << 16  # per rank; more mean a damaged file
ENGINE_FOLDER = "deepspeed"
# Features of the last probes, for runs that probe features.
FEATURES = "features.safetensors"


@dataclass
class TrainingState:
    """Everything but tensors that a run continues from."""

    step: int = 0
    """Optimizer steps attempted so far."""
    sequences: int = 0
    """Training sequences consumed so far: where the data continues."""
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
    pending: list[str] = field(default_factory=list)
    """What was due at this step and not done (validation), because the session was stopped on request."""
    released: dict[str, int] = field(default_factory=dict)
    """Learning-rate rules that were released by maturity, with the step of their release."""
    maturity: dict[str, Any] = field(default_factory=dict)
    """What the probes of pretrain/diagnostics/maturity.py have measured so far."""
    growth: dict[str, Any] = field(default_factory=dict)
    """What pretrain/growth/ has measured and decided so far; empty in a run whose heads were never changed."""
    from_seed: bool = True
    """Whether the seed alone gives the weights of step 0: they were not imported, and no head was added or removed."""
    imported: bool = False
    """Whether the weights of step 0 come from another model."""
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
    """Read a checkpoint's TrainingState.

    Raises:
        UserError: state.json cannot be read, or holds what no version of this program has written.
    """
    path = folder / "state.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {folder} holds no state.json; give one such as runs/NAME/checkpoints/step_000500"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint: {path} cannot be read ({type(error).__name__})") from None
    if isinstance(values, dict) and "pending" not in values:  # older versions call it owed
        values["pending"] = values.pop("owed", [])
    _check(values, path)
    # Older versions did not tell imported models from grown ones.
    values.setdefault("imported", not values.get("from_seed", True))
    return TrainingState(**values)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is float or (type(item) is int and abs(item) <= LARGEST_INTEGER) for item in value
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def _are_drifts(value: Any) -> bool:
    return isinstance(value, list) and all(_are_numbers(pair) and len(pair) == 2 for pair in value)


def _are_corpora(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in value
    )


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _are_lists_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_pair_or_null(value: Any) -> bool:
    return value is None or (_are_numbers(value) and len(value) == 2)


# Checks of the keys that are read inside fields that are mappings: the valid type in words, and a test for it. Keys
# may be missing, since older versions wrote fewer, and there may be others.
_KEY_CHECKS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "run": {
        "seed": ("a whole number", _is(int)),
        "data": ("text", _is(str)),
        "data_root": ("text", _is(str)),
        "lr_rules": ("a list", _is(list)),
        "optimizer": ("a mapping", _is(dict)),
        "logging": ("a mapping", _is(dict)),
        "document_mask": ("true or false", _is(bool)),
    },
    "data": {
        "tokenizer": ("a hash", _is(str)),
        "data": ("a list of pairs of hash and weight", _are_corpora),
    },
    "world": {
        "ranks": ("a number of ranks", _is_count),
        "tensor_parallel": ("a number of ranks", _is_count),
        "stage": ("a ZeRO stage", _is_count),
        "dtype": ("a dtype", _is(str)),
        "offload": ("a device or null", _is(str, type(None))),
        "partitioning": ("a mapping", _is(dict)),
        "threads": ("a number of threads", lambda value: _is_count(value) and 1 <= value <= MOST_THREADS),
        "device": ("a device", _is(str)),
        "versions": ("a mapping", _is(dict)),
        "code": ("a list of hashes", _are_lists_of(_is(str))),
    },
    "growth": {
        "start": ("a number of heads", _is_count),
        "checks": ("a count", _is_count),
        "calibration": ("a list of lists of numbers", _are_lists_of(_are_numbers)),
        "thresholds": ("a list of pairs of numbers, or null", _are_lists_of(_is_pair_or_null)),
        "wait": ("a list of counts", _are_lists_of(_is_count)),
        "grown": ("a list of counts", _are_lists_of(_is_count)),
        "below": ("a list of lists of counts", _are_lists_of(_are_lists_of(_is_count))),
        "events": ("a list of mappings", _are_lists_of(_is(dict))),
        "pending": ("a list of mappings", _are_lists_of(_is(dict))),
    },
    "maturity": {"probes": ("a list of pairs of step and drift", _are_drifts)},
}


def _check(values: Any, path: Path) -> None:
    """Refuse values of other types than a TrainingState has."""
    if not isinstance(values, dict):
        raise UserError(f"checkpoint: {path} holds {shown(values)}; it must hold a JSON object")
    defaults = asdict(TrainingState())
    for name, value in values.items():
        if name not in defaults:
            raise UserError(f"checkpoint: {path} has {shown(name)}, which this version does not know")
        default = defaults[name]
        if type(default) in (int, float):
            valid = type(value) in (int, type(default)) and 0 <= value <= LARGEST_INTEGER
            what = "a number from zero"
        else:
            valid, what = type(value) is type(default), type(default).__name__
        if name == "released":
            valid = valid and all(map(_is_count, value.values()))
            what = "a mapping from names of rules to steps"
        elif name == "recent":
            valid = valid and value.keys() <= {"losses", "norms"} and all(map(_are_numbers, value.values()))
            what = "a mapping from losses and norms to lists of numbers"
        elif name == "pending":
            valid = valid and all(isinstance(item, str) for item in value)
            what = "a list of names"
        if not valid:
            raise UserError(f"checkpoint: {name} in {path} is {shown(value)}; it must be {what}")
        for inner, (what, fits) in _KEY_CHECKS.get(name, {}).items():
            if inner in value and not fits(value[inner]):
                raise UserError(
                    f"checkpoint: {name}.{inner} in {path} is {shown(value[inner])}; it must be {what}"
                )


def read_features(folder: Path) -> dict[str, Tensor]:
    """The features of the last probes before a checkpoint, by name; empty when there are none.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / FEATURES
    with understood(path):
        features = load_file(path) if path.is_file() else {}
        for name, tensor in features.items():
            if tensor.dtype != torch.float32:
                raise TypeError(f"{name} is {tensor.dtype}")
        return features


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged or edited checkpoint file into a one-line UserError. Only reading belongs inside.

    No file is trusted: it may hold containers of any shape and type, and not all of them are checked for.

    Raises:
        UserError: it names *path*.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SafetensorError, TypeError,
        UnpicklingError, ValueError,
    ) as error:  # fmt: skip
        message = next(iter(str(error).strip().splitlines()), "")[:160]
        raise UserError(
            f"checkpoint: {path} does not hold what a checkpoint's file holds ({type(error).__name__}: "
            f"{message if message.isprintable() else ascii(message)}); restore it, or continue from an earlier step"
        ) from error
