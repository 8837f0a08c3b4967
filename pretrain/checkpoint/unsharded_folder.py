"""Writes and reads unsharded checkpoints, from which any world can continue and which need no engine.

    step_000500.canonical/
      state.json  manifest.json  tokenizer/                  as in every checkpoint
      canonical/index.json                                   steps and files by parameter, groups by name
      canonical/layers.0.attention.q.weight.safetensors      fp32, exp_avg, exp_avg_sq in full shape
      …

It is written under a hidden name, synced and renamed: an interrupted write leaves nothing that looks like a
checkpoint, and the next one starts again. Under a name such as ``step_000500`` a run resumes from it as from
any other checkpoint; that is how models made elsewhere (imported, grown) enter a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.declared import Count, declared, from_plain, to_plain
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.deepspeed_files import MASTERS, MOMENTS
from pretrain.checkpoint.manifest import write_manifest
from pretrain.checkpoint.source import ParameterGroup
from pretrain.checkpoint.state import TrainingState
from pretrain.utils.files import InnerPath, atomic_folder, copy_folder, file_entry, write_atomically
from pretrain.utils.parsing import read_json

CANONICAL_FOLDER = "canonical"  # the name that run folders have had from the beginning
INDEX = "index.json"


@declared()
class ParameterEntry:
    """Where a parameter is."""

    file: InnerPath
    step: Count = 0
    """Updates that Adam has applied."""


@declared()
class GroupEntry:
    """An optimizer group."""

    parameters: list[str]
    settings: dict[str, Any]


@declared()
class Index:
    """The contents of INDEX."""

    parameters: dict[str, ParameterEntry]
    groups: dict[str, GroupEntry]
    format: Literal[1] = 1


@dataclass(frozen=True)
class UnshardedParameter:
    """One parameter to write."""

    name: str
    weight: Tensor
    """The fp32 master weight, full shape."""
    exp_avg: Tensor | None = None
    """Adam's first moment, fp32, full shape; None is zero."""
    exp_avg_sq: Tensor | None = None
    """Adam's second moment, the same."""
    step: int = 0
    """Updates that Adam has applied."""


def write_unsharded(
    target: Path,
    state: TrainingState,
    groups: Iterable[ParameterGroup],
    parameters: Iterable[UnshardedParameter],
    tokenizer_folder: Path,
) -> Path:
    """Write an unsharded checkpoint, with one parameter in memory at a time.

    Args:
        target: the checkpoint's folder; one that exists is replaced when the new one is complete.
        state: its TrainingState, whose ``model`` determines the parameters.
        groups: the optimizer's groups; none leaves the hyperparameters to the run that continues from it.
        parameters: every parameter of the model, in any order.
        tokenizer_folder: copied into the checkpoint.

    Returns:
        *target*.

    Raises:
        UserError: a parameter is missing, unknown or of the wrong shape or dtype, or the disk is full.
            Nothing is left behind then, and an existing *target* stays.
    """
    specs = parameter_specs(ModelConfig.from_json(state.model))
    try:
        with atomic_folder(target) as partial:
            folder = partial / CANONICAL_FOLDER
            folder.mkdir()
            copy_folder(tokenizer_folder, partial / "tokenizer")
            entries: dict[str, ParameterEntry] = {}
            for parameter in parameters:
                tensors = _checked(parameter, specs)
                path = folder / f"{parameter.name}.safetensors"
                save_file(tensors, path)
                entries[parameter.name] = ParameterEntry(path.name, parameter.step)
            missing = [name for name in specs if name not in entries]
            if missing:
                raise UserError(f"checkpoint: {len(missing)} parameters were not given, {missing[0]} first")
            index = Index(entries, {g.name: GroupEntry(g.parameters, g.settings) for g in groups})
            write_atomically(folder / INDEX, json.dumps(to_plain(index), indent=1))
            write_atomically(partial / "state.json", json.dumps(asdict(state), indent=1))
            files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
            write_manifest(partial, {f.relative_to(partial).as_posix(): file_entry(f) for f in files})
    except OSError as error:
        raise UserError(
            f"checkpoint: cannot write {error.filename or target}: {error.strerror or error}"
        ) from None
    return target


def _checked(parameter: UnshardedParameter, specs: dict[str, ParameterSpec]) -> dict[str, Tensor]:
    """The tensors of a parameter, after a check that they fit the model."""
    if parameter.name not in specs:
        raise UserError(f"checkpoint: {parameter.name} is not a parameter of the model that is to be written")
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


class FolderSource:
    """Tensors from a ``canonical`` folder."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec]) -> None:
        self.folder, self.specs = folder, specs
        path = folder / INDEX
        index = from_plain(Index, read_json(path, "checkpoint"), f"checkpoint: {path}")
        self._entries = index.parameters
        self.groups = {
            name: ParameterGroup(name, group.parameters, _tuples(group.settings))
            for name, group in index.groups.items()
        }
        for name, entry in index.parameters.items():
            if not (folder / entry.file).is_file():
                raise UserError(f"checkpoint: {folder / entry.file}, which holds {name}, is missing")

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str, key: str) -> Tensor:
        path = self.folder / self._entries[name].file
        try:
            with safe_open(path, framework="pt") as file:
                if key in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                    tensor = file.get_tensor(key).clone()
                elif key in MOMENTS:
                    tensor = torch.zeros(self.specs[name].shape)
                else:
                    raise UserError(f"checkpoint: {path} does not hold the weight of {name}")
        except (OSError, SafetensorError) as error:
            raise UserError(f"checkpoint: {path} cannot be read ({error})") from None
        if tuple(tensor.shape) != self.specs[name].shape or tensor.dtype != torch.float32:
            raise UserError(
                f"checkpoint: {key} of {name} is {tensor.dtype} {list(tensor.shape)} in {path}, "
                f"its model says fp32 {list(self.specs[name].shape)}"
            )
        return tensor

    def step(self, name: str) -> int:
        return self._entries[name].step

    def release(self) -> None:
        """Nothing stays mapped between reads."""


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """Turn the lists of JSON into the tuples that optimizers use (betas)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
