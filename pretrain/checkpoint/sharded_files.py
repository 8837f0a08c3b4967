"""Reads the tensor files of a checkpoint, by any number of ranks: ranges of shards, or whole parameters.

    checkpoint = UnshardedCheckpoint.open(Path("runs/NAME/checkpoints/step_000500"))
    for name in checkpoint.names():
        weight = checkpoint.parameter(name)          # fp32 master weight, full shape
        moments = checkpoint.optimizer_state(name)   # exp_avg, exp_avg_sq (full shape), step

Whole parameters need no process group, no GPU and no model in memory, and about one of them is held at a
time: evaluation and conversion to other formats read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from model.config import VOCABULARY_MULTIPLE, ModelConfig
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.index import (
    HYPERPARAMETERS,
    INDEX,
    MASTERS,
    TENSORS_FOLDER,
    Parameter,
    flat_name,
    rank_file,
    read_index,
)
from pretrain.checkpoint.random_state import PREFIX
from pretrain.checkpoint.state import TrainingState, WorldRecord, explain_damage, read_state
from pretrain.optim.muon import MOMENTS


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer group."""

    parameters: list[str]
    settings: dict[str, Any]
    """Hyperparameters: lr, weight_decay, betas, eps and any others of the group."""


class Source(Protocol):
    """Where a checkpoint's tensors come from."""

    groups: dict[str, ParameterGroup]

    def names(self) -> list[str]:
        """Names of the parameters."""

    def tensor(self, name: str, key: str) -> Tensor:
        """MASTERS or one of MOMENTS of a parameter, in full."""

    def holds_shard(self, name: str, count: int) -> bool:
        """Whether read_shard reads the shards of a parameter that *count* tensor-parallel ranks have."""

    def read_shard(self, name: str, key: str, shard: int, start: int, out: Tensor) -> None:
        """Fill *out*, flat, with the elements of a parameter's shard from *start* on.

        Args:
            shard: the tensor-parallel rank; any where no rank has only a part.
        """

    def step(self, name: str) -> int:
        """Updates that Adam has applied to it."""

    def check(self, part: int, parts: int) -> None:
        """Check that every file has the expected tensors with the expected sizes; only sizes are read.

        Args:
            part: which of *parts* equal shares of the files to check (each rank checks its own).

        Raises:
            UserError: it names the file.
        """

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """What pretrain.checkpoint.random_state returned on a rank; empty if it is not stored."""

    def release(self) -> None:
        """Unmap the files that reading has mapped into memory."""


# Pages of a mapped file count as this process's memory until it is unmapped: reopen after this many bytes.
RELEASE_AFTER = 16 << 20


class ShardedFiles:
    """The tensor files of one checkpoint (a Source). No content of a file is trusted.

    Args:
        folder: the checkpoint's TENSORS_FOLDER.
        specs: the parameters of the checkpoint's model.
        world: the parallel configuration that wrote it, if state.json has it.

    Raises:
        UserError: a file is missing, or the index is damaged or of another model.
    """

    def __init__(
        self, folder: Path, specs: dict[str, ParameterSpec], world: WorldRecord | None = None
    ) -> None:
        self.folder, self.specs = folder, specs
        with explain_damage(folder / INDEX):
            self._index = read_index(folder)
        self._shards = self._index.tensor_parallel
        ranks = (self._index.ranks, self._shards)
        if world and ranks != (world.ranks, world.tensor_parallel):
            raise UserError(
                f"checkpoint: {folder / INDEX} is of {ranks[0]} ranks, {ranks[1]} of them tensor-parallel, "
                f"state.json of {world.ranks} and {world.tensor_parallel}"
            )
        for name in self._index.parameters.keys() & specs.keys():
            self._check_entry(name, self._index.parameters[name])
        files = map(rank_file, range(ranks[0]))
        missing = next((name for name in files if not (folder / name).is_file()), None)
        if missing is not None:
            raise UserError(
                f"checkpoint: {folder} lacks {missing}; it was written by {ranks[0]} ranks, one file each"
            )
        self._files: dict[int, Any] = {}
        self._read_bytes = 0
        self.groups = {
            name: ParameterGroup(
                [parameter for parameter, entry in self._index.parameters.items() if entry.group == name],
                {key: getattr(group, key) for key in (*HYPERPARAMETERS, "kind")},
            )
            for name, group in self._index.groups.items()
        }

    def names(self) -> list[str]:
        return list(self._index.parameters)

    def step(self, name: str) -> int:
        return self._index.parameters[name].step

    def tensor(self, name: str, key: str) -> Tensor:
        entry = self._index.parameters[name]
        whole = torch.empty(self._padded_shape(name))
        for number in range(len(entry.shards)):  # copied straight into its place: never two full copies
            if entry.split is None:
                self.read_shard(name, key, number, 0, whole.view(-1))
            else:
                shard = torch.empty(entry.shard_shape)
                self.read_shard(name, key, number, 0, shard.view(-1))
                length = shard.shape[entry.split]
                whole.narrow(entry.split, number * length, length).copy_(shard)
        return whole[: self.specs[name].shape[0]]

    def holds_shard(self, name: str, count: int) -> bool:
        return self.specs[name].shard_dimension is None or self._shards == count

    def read_shard(self, name: str, key: str, shard: int, start: int, out: Tensor) -> None:
        entry = self._index.parameters[name]
        if key not in self._keys(entry):
            out.zero_()
            return
        begin, end = start, start + out.numel()
        position = 0
        for rank, number, offset, length in entry.shards[shard if entry.split is not None else 0]:
            first, last = max(begin, position), min(end, position + length)
            if first < last:
                source = self._flat(rank, key, number)[offset + first - position : offset + last - position]
                out[first - begin : last - begin].copy_(source)
                self._read_bytes += source.nbytes
            position += length
        if self._read_bytes > RELEASE_AFTER:
            self.release()

    def check(self, part: int, parts: int) -> None:
        for rank in range(part, self._index.ranks, parts):
            path = self.folder / rank_file(rank)
            with explain_damage(path):
                for (key, number), least in self._least_sizes.get(rank, {}).items():
                    flat = self._flat(rank, key, number)
                    shape = flat.get_shape()
                    if flat.get_dtype() != "F32" or len(shape) != 1 or shape[0] < least:
                        raise ValueError(
                            f"{flat_name(key, number)} is {flat.get_dtype()} {shape}, not F32 [{least:,}]"
                        )
            self.release()

    def random_state(self, rank: int) -> dict[str, Tensor]:
        with explain_damage(self.folder / rank_file(rank)):
            file = self._file(rank)
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(PREFIX)}  # noqa: SIM118

    def release(self) -> None:
        """Unmap the files, and with them the memory of what was read; they are mapped again when needed."""
        self._files.clear()
        self._read_bytes = 0

    @cached_property
    def _least_sizes(self) -> dict[int, dict[tuple[str, int], int]]:
        """By rank, the fewest elements that each flat tensor of its file must have."""
        least: dict[int, dict[tuple[str, int], int]] = {}
        for entry in self._index.parameters.values():
            for rank, number, offset, length in (piece for pieces in entry.shards for piece in pieces):
                flats = least.setdefault(rank, {})
                for key in self._keys(entry):
                    flats[key, number] = max(flats.get((key, number), 0), offset + length)
        return least

    def _keys(self, entry: Parameter) -> list[str]:
        """What the files hold of a parameter."""
        return [MASTERS, *(self._index.groups[entry.group].moments if entry.group is not None else ())]

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / rank_file(rank), framework="pt")
        return self._files[rank]

    def _flat(self, rank: int, key: str, number: int) -> Any:
        """A flat tensor of a file, of which slices can be read."""
        return self._file(rank).get_slice(flat_name(key, number))

    def _check_entry(self, name: str, entry: Parameter) -> None:
        """Raise UserError for an entry that is not what the model says, or contradicts itself."""
        spec, found = self.specs[name], (entry.shape, entry.shard_shape, entry.split)
        split = spec.shard_dimension if self._shards > 1 else None
        shard_shape = self._padded_shape(name)
        if split is not None:
            shard_shape[split] //= self._shards
        expected = (list(spec.shape), shard_shape, split)
        where = f"checkpoint: {self.folder / INDEX}"
        if found != expected:
            raise UserError(
                f"{where}: {name} has shape {found[0]}, {found[1]} on a rank, split along {found[2]}; in the "
                f"model it describes {expected[0]}, {expected[1]} and {expected[2]}; the files are of "
                "another model"
            )
        lengths = [sum(length for _, _, _, length in pieces) for pieces in entry.shards]
        if lengths != [math.prod(shard_shape)] * (1 if split is None else self._shards):
            raise UserError(f"{where}: the pieces of {name} are not those of {shard_shape} on a rank")
        if any(rank >= self._index.ranks for pieces in entry.shards for rank, _, _, _ in pieces):
            raise UserError(f"{where}: {name} lies on a rank beyond {self._index.ranks - 1}")
        if entry.group is not None and entry.group not in self._index.groups:
            raise UserError(f"{where}: {name} is of a group that the index does not have")

    def _padded_shape(self, name: str) -> list[int]:
        """A parameter's shape over all tensor-parallel ranks, the vocabulary padded for them."""
        spec = self.specs[name]
        shape = list(spec.shape)
        if spec.vocabulary:
            multiple = math.lcm(VOCABULARY_MULTIPLE, self._shards)
            shape[0] = -(-shape[0] // multiple) * multiple
        return shape


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

        Sizes and hashes are not checked here; pretrain.checkpoint.manifest.verify does that.

        Raises:
            UserError: the folder is no checkpoint, files are missing or damaged, or do not fit their model.
        """
        folder = Path(folder)
        state = read_state(folder)
        with explain_damage(folder):
            specs = parameter_specs(ModelConfig.from_json(state.model))
            source = ShardedFiles(folder / TENSORS_FOLDER, specs, state.world)
        _check_names(folder, set(source.names()), set(specs))
        return cls(folder, state, source, specs)

    def names(self) -> list[str]:
        """Parameters in the model's order."""
        return list(self.specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's full shape."""
        return self.specs[name].shape

    def parameter(self, name: str) -> Tensor:
        """The fp32 master weight, full shape; a copy that the caller may modify."""
        return self.tensor(name, MASTERS)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Adam's moments (fp32, full shape, zero before the first update) and how many updates it applied.

        Of a matrix that Muon steps the momentum is exp_avg, and exp_avg_sq is zero.
        """
        exp_avg, exp_avg_sq = (self.tensor(name, key) for key in MOMENTS)
        return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": self.step(name)}

    def step(self, name: str) -> int:
        """Updates that Adam has applied to a parameter."""
        with explain_damage(self.folder):
            return self._source.step(name)

    def tensor(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter: ``fp32`` (its weight), ``exp_avg`` or ``exp_avg_sq``."""
        with explain_damage(self.folder):
            return self._source.tensor(name, key)

    def holds_shard(self, name: str, count: int) -> bool:
        """See Source.holds_shard."""
        return self._source.holds_shard(name, count)

    def read_shard(self, name: str, key: str, shard: int, start: int, out: Tensor) -> None:
        """Fill *out*, flat fp32, with the elements of a shard from *start* on, and read no others.

        Args:
            shard: the tensor-parallel rank.
        """
        with explain_damage(self.folder):
            self._source.read_shard(name, key, shard, start, out)

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """The states of a rank's generators, as restore_random_state takes them; empty if not stored."""
        return self._source.random_state(rank)

    def check(self, part: int = 0, parts: int = 1) -> None:
        """See Source.check."""
        with explain_damage(self.folder):
            self._source.check(part, parts)

    def release(self) -> None:
        """Unmap the files read so far, which are counted as this process's memory until then."""
        self._source.release()


def _check_names(folder: Path, stored: set[str], expected: set[str]) -> None:
    problems = []
    for word, names in (("lacks", expected - stored), ("has unknown", stored - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"{word} {min(names)}{more}")
    if problems:
        raise UserError(f"checkpoint: {folder} does not fit the model it describes: {'; '.join(problems)}")
