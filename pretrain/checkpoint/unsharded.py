"""The canonical form of a checkpoint: full-shape fp32 tensors by parameter name, whatever world wrote them.

    checkpoint = UnshardedCheckpoint.open(Path("runs/NAME/checkpoints/step_000500"))
    for name in checkpoint.names():
        weight = checkpoint.parameter(name)          # fp32 master weight, full shape
        moments = checkpoint.optimizer_state(name)   # exp_avg, exp_avg_sq (full shape), step

Every change of shape passes through it, and so does conversion to other formats. It needs no process group,
no GPU and no model in memory, and holds about one parameter at a time. It reads ``deepspeed/`` folders of any
ZeRO stage, dtype, data-parallel and tensor-parallel size, what DeepSpeed's own converter made of them
(``universal/``, see universal.py), and ``canonical/`` folders (unsharded_folder.py writes those).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.deepspeed_files import MASTERS, MOMENTS, DeepSpeedShards
from pretrain.checkpoint.state import ENGINE_FOLDER, UNIVERSAL_FOLDER, TrainingState, read_state
from pretrain.checkpoint.universal import UniversalFolder

CANONICAL_FOLDER = "canonical"
INDEX = "index.json"
INDEX_FORMAT = 1


class AdamState(TypedDict):
    """What Adam knows about one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer group by its name."""

    name: str
    parameters: list[str]
    settings: dict[str, Any]
    """Hyperparameters: lr, weight_decay, betas, eps and whatever else the group carries."""


class Source(Protocol):
    """Where a checkpoint's tensors come from."""

    groups: dict[str, ParameterGroup]

    def names(self) -> list[str]:
        """Parameters that are there."""

    def tensor(self, name: str, key: str) -> Tensor:
        """MASTERS or one of MOMENTS of a parameter, in full."""

    def step(self, name: str) -> int:
        """Updates that Adam has applied to it."""

    def release(self) -> None:
        """Let go of what reading has mapped into memory."""


class UnshardedCheckpoint:
    """A checkpoint of any shape, read as if one rank had written it.

    Attributes:
        folder: the checkpoint's folder.
        state: everything but tensors.
        specs: what the model in ``state`` expects of each parameter.
        groups: the optimizer's groups by name.
    """

    def __init__(
        self, folder: Path, state: TrainingState, source: Source, specs: dict[str, ParameterSpec]
    ) -> None:
        self.folder, self.state, self.specs = folder, state, specs
        self.groups = source.groups
        self._source = source

    @classmethod
    def open(cls, folder: Path) -> UnshardedCheckpoint:
        """Open a checkpoint: ``checkpoints/step_000500``.

        Sizes and hashes are not checked here; pretrain.checkpoint.store.verify does that.

        Raises:
            UserError: the folder is no checkpoint, files are missing or damaged, or do not fit their model.
        """
        folder = Path(folder)
        state = _read_state(folder)
        try:
            config = ModelConfig.from_json(state.model)
        except (TypeError, KeyError) as error:
            raise UserError(f"checkpoint: {folder}/state.json describes no model ({error})") from None
        specs = parameter_specs(config)
        source: Source
        if (folder / ENGINE_FOLDER).is_dir():
            source = _ShardedSource(folder / ENGINE_FOLDER, specs)
        elif (folder / CANONICAL_FOLDER).is_dir():
            source = _FolderSource(folder / CANONICAL_FOLDER, specs)
        elif (folder / UNIVERSAL_FOLDER).is_dir():
            source = _UniversalSource(folder / UNIVERSAL_FOLDER, specs, config.vocab_size)
        else:
            raise UserError(
                f"checkpoint: {folder} has no {ENGINE_FOLDER}, {CANONICAL_FOLDER} or {UNIVERSAL_FOLDER} folder"
            )
        _check_names(folder, set(source.names()), set(specs))
        return cls(folder, state, source, specs)

    def names(self) -> list[str]:
        """Parameters in the model's order."""
        return list(self.specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's full shape."""
        return self.specs[name].shape

    def parameter(self, name: str) -> Tensor:
        """The fp32 master weight, full shape; a copy, of which the caller may do what they like."""
        return self._source.tensor(name, MASTERS)

    def optimizer_state(self, name: str) -> AdamState:
        """Adam's moments (fp32, full shape, zero before the first update) and how many updates it applied."""
        exp_avg, exp_avg_sq = (self._source.tensor(name, key) for key in MOMENTS)
        return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": self.step(name)}

    def step(self, name: str) -> int:
        """Updates that Adam has applied to a parameter."""
        return self._source.step(name)

    def tensor(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter: ``fp32`` (its weight), ``exp_avg`` or ``exp_avg_sq``."""
        return self._source.tensor(name, key)

    def release(self) -> None:
        """Unmap the files read so far, which are counted as this process's memory until then."""
        self._source.release()


class _ShardedSource:
    """Tensors from DeepSpeed's files, joined over data-parallel and tensor-parallel ranks."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec]) -> None:
        self.folder, self.specs = folder, specs
        self.shards = DeepSpeedShards(folder)
        self.groups = {
            settings["name"]: ParameterGroup(
                settings["name"],
                self.shards.group_parameters(index),
                _hyperparameters(settings),
            )
            for index, settings in enumerate(self.shards.group_settings)
        }
        for name in self.shards.names():
            if name in specs:
                self._check_shape(name)

    def names(self) -> list[str]:
        return self.shards.names()

    def tensor(self, name: str, key: str) -> Tensor:
        spec = self.specs[name]
        ranks = self.shards.tensor_parallel
        if spec.shard_dimension is None or ranks == 1:
            return _without_padding(self.shards.read(name, key, 0), spec, name, self.folder)
        whole = torch.empty(spec.shape)
        start = 0
        for rank in range(ranks):  # into its place at once: never two copies beside each other
            part = self.shards.read(name, key, rank)
            length = part.shape[spec.shard_dimension]
            kept = min(length, max(0, spec.shape[spec.shard_dimension] - start))
            whole.narrow(spec.shard_dimension, min(start, spec.shape[spec.shard_dimension]), kept).copy_(
                part.narrow(spec.shard_dimension, 0, kept)
            )
            if kept < length and part.narrow(spec.shard_dimension, kept, length - kept).any():
                raise _padding_error(name, self.folder)
            start += length
        return whole

    def step(self, name: str) -> int:
        return self.shards.step(name)

    def release(self) -> None:
        self.shards.release()

    def _check_shape(self, name: str) -> None:
        spec = self.specs[name]
        joined = list(self.shards.shard_shape(name))
        if spec.shard_dimension is not None:
            joined[spec.shard_dimension] *= self.shards.tensor_parallel
        fits = tuple(joined) == spec.shape
        if spec.vocabulary:
            fits = joined[0] >= spec.shape[0] and tuple(joined[1:]) == spec.shape[1:]
        if not fits:
            raise UserError(
                f"checkpoint: {name} has shape {joined} in {self.folder}, its model says {list(spec.shape)}; "
                "the files are of another model"
            )


def _without_padding(whole: Tensor, spec: ParameterSpec, name: str, folder: Path) -> Tensor:
    """The tensor without the vocabulary rows that only its world's padding has."""
    rows = spec.shape[0]
    if not spec.vocabulary or whole.shape[0] <= rows:
        return whole
    if whole[rows:].any():
        raise _padding_error(name, folder)
    return whole[:rows].clone()


def _padding_error(name: str, folder: Path) -> UserError:
    return UserError(f"checkpoint: padded vocabulary rows of {name} are not zero in {folder}")


class _UniversalSource:
    """Tensors from a folder that DeepSpeed's converter wrote, which joined the ranks' parts already."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec], vocab_size: int) -> None:
        self.folder, self.specs, self.vocab_size = folder, specs, vocab_size
        self.universal = UniversalFolder(folder)
        self._names = self.universal.names()
        self.groups = {
            settings["name"]: ParameterGroup(
                settings["name"], self.universal.groups[settings["name"]], _hyperparameters(settings)
            )
            for settings in self.universal.group_settings
        }

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str, key: str) -> Tensor:
        spec = self.specs[name]
        found = self.universal.read(name, key)
        rows = spec.shape[0]
        if found.ndim == 1 < len(spec.shape) and found.numel() % math.prod(spec.shape[1:]) == 0:
            found = found.view(-1, *spec.shape[1:])  # flat, as stage 3 leaves it
        if spec.vocabulary and found.shape[0] == self.vocab_size < rows:
            padded = torch.zeros(spec.shape)
            padded[: self.vocab_size] = found
            return padded
        whole = _without_padding(found, spec, name, self.folder)
        if tuple(whole.shape) != spec.shape:
            raise UserError(
                f"checkpoint: {key} of {name} has shape {list(found.shape)} in {self.folder}, its model says "
                f"{list(spec.shape)}; ds_to_universal did not know how the tensor-parallel parts of this parameter join"
            )
        return whole.clone() if whole is found else whole

    def step(self, name: str) -> int:
        return self.universal.step(name)

    def release(self) -> None:
        """Nothing stays mapped between reads."""


class _FolderSource:
    """Tensors from a ``canonical`` folder."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec]) -> None:
        self.folder, self.specs = folder, specs
        path = folder / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != INDEX_FORMAT:
                raise UserError(
                    f"checkpoint: {path} has format {index['format']}, this version reads {INDEX_FORMAT}"
                )
            self.steps: dict[str, int] = {name: entry["step"] for name, entry in index["parameters"].items()}
            self.files: dict[str, str] = {name: entry["file"] for name, entry in index["parameters"].items()}
            self.groups = {
                name: ParameterGroup(name, group["parameters"], _tuples(group["settings"]))
                for name, group in index["groups"].items()
            }
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"checkpoint: {path} cannot be read ({type(error).__name__}: {error})") from None
        for name in specs:
            if name in self.files and not (folder / self.files[name]).is_file():
                raise UserError(f"checkpoint: {folder / self.files[name]}, which holds {name}, is missing")

    def names(self) -> list[str]:
        return list(self.files)

    def tensor(self, name: str, key: str) -> Tensor:
        path = self.folder / self.files[name]
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
        return self.steps[name]

    def release(self) -> None:
        """Nothing stays mapped between reads."""


def _hyperparameters(settings: dict[str, Any]) -> dict[str, Any]:
    """What a group says about the training, without its name and parameters."""
    return {key: settings[key] for key in settings if key not in ("name", "params", "parameter_names")}


def _read_state(folder: Path) -> TrainingState:
    try:
        return read_state(folder)
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {folder} holds no state.json; give one such as runs/NAME/checkpoints/step_000500"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"checkpoint: {folder}/state.json cannot be read ({type(error).__name__})") from None


def _check_names(folder: Path, found: set[str], wanted: set[str]) -> None:
    problems = []
    for word, names in (("lacks", wanted - found), ("has unknown", found - wanted)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"{word} {min(names)}{more}")
    if problems:
        raise UserError(f"checkpoint: {folder} does not fit the model it describes: {'; '.join(problems)}")


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where optimizers have tuples (betas)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
