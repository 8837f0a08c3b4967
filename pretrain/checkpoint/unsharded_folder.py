"""The canonical form on disk: a checkpoint that any world can continue from and that no engine had to write.

    step_000500.canonical/
      state.json  manifest.json  tokenizer/                  as in every checkpoint
      canonical/index.json                                   steps and files by parameter, groups by name
      canonical/layers.0.attention.q.weight.safetensors      fp32, exp_avg, exp_avg_sq in full shape
      …

It is written under a hidden name, synced and renamed: an interrupted write leaves nothing that looks like a
checkpoint, and the next one starts afresh. Under a name such as ``step_000500`` a run resumes from it as from
any other checkpoint; that is how models made elsewhere (imported, grown) enter a run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.deepspeed_files import MASTERS
from pretrain.checkpoint.progress import Progress, Report
from pretrain.checkpoint.state import FEATURES, FORMAT, TrainingState
from pretrain.checkpoint.unsharded import (
    CANONICAL_FOLDER,
    INDEX,
    INDEX_FORMAT,
    ParameterGroup,
    UnshardedCheckpoint,
)
from pretrain.utils.files import atomic_folder, file_entry, write_atomically


@dataclass(frozen=True)
class CanonicalParameter:
    """One parameter as it is written."""

    name: str
    weight: Tensor
    """The fp32 master weight, full shape."""
    exp_avg: Tensor | None = None
    """Adam's first moment, fp32, full shape; None is zero."""
    exp_avg_sq: Tensor | None = None
    """Adam's second moment, the same."""
    step: int = 0
    """Updates that Adam has applied."""


def write_canonical(
    target: Path,
    state: TrainingState,
    groups: Iterable[ParameterGroup],
    parameters: Iterable[CanonicalParameter],
    tokenizer_folder: Path,
    report: Report = lambda line: None,
    features: Path | None = None,
) -> Path:
    """Write a checkpoint in canonical form, with one parameter in memory at a time.

    Args:
        target: the checkpoint's folder; one that exists is replaced when the new one is complete.
        state: its TrainingState, whose ``model`` says which parameters there are.
        groups: the optimizer's groups; none leaves the hyperparameters to the run that continues from it.
        parameters: every parameter of the model, in any order.
        tokenizer_folder: copied into the checkpoint.
        report: is given progress to print.
        features: a file of probed features to copy along, if there is one.

    Returns:
        *target*.

    Raises:
        UserError: a parameter is missing, unknown or of the wrong shape or dtype, or the disk is full.
            Nothing is left then; a *target* that existed stays.
    """
    specs = parameter_specs(ModelConfig.from_json(state.model))
    progress = Progress(f"writing {target.name}", {name: s.shape for name, s in specs.items()}, report)
    try:
        with atomic_folder(target) as partial:
            folder = partial / CANONICAL_FOLDER
            folder.mkdir()
            shutil.copytree(tokenizer_folder, partial / "tokenizer")
            if features is not None and features.is_file():
                shutil.copyfile(features, partial / FEATURES)
            entries: dict[str, Any] = {}
            for parameter in parameters:
                tensors = _checked(parameter, specs)
                path = folder / f"{parameter.name}.safetensors"
                save_file(tensors, path)
                entries[parameter.name] = {"file": path.name, "step": parameter.step}
                progress.add(parameter.name)
            missing = [name for name in specs if name not in entries]
            if missing:
                raise UserError(f"checkpoint: {len(missing)} parameters were not given, {missing[0]} first")
            index = {
                "format": INDEX_FORMAT,
                "parameters": entries,
                "groups": {g.name: {"parameters": g.parameters, "settings": g.settings} for g in groups},
            }
            write_atomically(folder / INDEX, json.dumps(index, indent=1))
            _add_state_and_manifest(partial, state)
    except OSError as error:
        raise UserError(
            f"checkpoint: cannot write {error.filename or target}: {error.strerror or error}"
        ) from None
    return target


def save_canonical(checkpoint: UnshardedCheckpoint, target: Path, report: Report = lambda line: None) -> Path:
    """Write any checkpoint in canonical form. Raises as write_canonical and reading do."""
    return write_canonical(
        target,
        checkpoint.state,
        checkpoint.groups.values(),
        _parameters(checkpoint),
        checkpoint.folder / "tokenizer",
        report,
        checkpoint.folder / FEATURES,
    )


def _parameters(checkpoint: UnshardedCheckpoint) -> Iterator[CanonicalParameter]:
    for name in checkpoint.names():
        yield CanonicalParameter(name, checkpoint.parameter(name), **checkpoint.optimizer_state(name))


def _checked(parameter: CanonicalParameter, specs: dict[str, ParameterSpec]) -> dict[str, Tensor]:
    """The tensors of a parameter, known to fit the model."""
    if parameter.name not in specs:
        raise UserError(f"checkpoint: {parameter.name} is no parameter of the model that is to be written")
    moments = {"exp_avg": parameter.exp_avg, "exp_avg_sq": parameter.exp_avg_sq}
    tensors = {MASTERS: parameter.weight} | {key: t for key, t in moments.items() if t is not None}
    shape = specs[parameter.name].shape
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise UserError(
                f"checkpoint: {key} of {parameter.name} is {tensor.dtype} {list(tensor.shape)}; the model "
                f"needs fp32 {list(shape)}"
            )
    return {key: tensor.detach().contiguous() for key, tensor in tensors.items()}


def _add_state_and_manifest(folder: Path, state: TrainingState) -> None:
    write_atomically(folder / "state.json", json.dumps(asdict(state), indent=1))
    files = {
        path.relative_to(folder).as_posix(): file_entry(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_atomically(folder / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
