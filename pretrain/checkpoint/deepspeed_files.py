"""Reads the files of DeepSpeed's ZeRO optimizers, one parameter at a time, without a process group or GPU.

Stages 1 and 2 (DeepSpeedZeroOptimizer, and BF16_Optimizer, which is stage 1 in bf16 with fp32 gradients) and
stage 3, on the device or offloaded to the host, for any number of data- and tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import VOCABULARY_MULTIPLE
from model.errors import UserError
from model.parameters import ParameterSpec
from pretrain.checkpoint.source import ParameterGroup
from pretrain.checkpoint.state import WorldRecord, understood
from pretrain.engine.layout import Piece, contiguous_pieces, sliced_pieces
from pretrain.optim.muon import moments_of

# Pages of a mapped file count as this process's memory until it is unmapped: reopen after this many bytes.
RELEASE_AFTER = 256 << 20
MASTERS = "fp32"
OF_ALL = ("dp_world_size", "mp_world_size", "param_shapes")
"""What the model states of all ranks have in common."""


class _Inert:
    """Stands for a DeepSpeed class in a pickle: stores any arguments and state, does nothing with them."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.arguments = (state,)


# The classes that occur in DeepSpeed's files besides tensors and plain containers. None of their code runs:
# reading an untrusted file can only create these objects.
ALLOWED = [
    (_Inert, f"deepspeed.{name}")
    for name in (
        "utils.tensor_fragment.fragment_address",
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
    )
]


def load_safely(path: Path) -> Any:
    """Load a .pt file, its tensors mapped from disk; only tensors, containers and inert stand-ins are made.

    Raises:
        UserError: the file is missing, damaged, or holds objects of other classes.
    """
    with understood(path), torch.serialization.safe_globals(ALLOWED):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@dataclass(frozen=True)
class FlatGroup:
    """One flat tensor of every rank: a whole group (stages 1 and 2) or a sub-group of one (stage 3)."""

    group: int
    """Index of the optimizer's group."""
    state: int
    """Key of its Adam state in the optimizer's state dict."""
    parameters: list[str]
    """Its parameters in order."""


class ShardedSource:
    """The ZeRO files of one checkpoint: a Source of tensors joined over all ranks.

    Args:
        folder: the checkpoint's ``deepspeed`` folder.
        specs: the parameters of the checkpoint's model.
        world: what state.json says of the ranks that wrote it, if it does.

    Raises:
        UserError: a file is missing or damaged, or is of another model.
    """

    def __init__(
        self, folder: Path, specs: dict[str, ParameterSpec], world: WorldRecord | None = None
    ) -> None:
        self.folder, self.specs = folder, specs
        self._files: dict[Path, Any] = {}
        self._touched = 0
        path = self._model_path(0, 0)
        model_states = load_safely(path)
        with understood(path):
            self._first = {key: model_states[key] for key in OF_ALL}
            self.data_parallel, self.tensor_parallel, shapes = self._first.values()
            ranks = world and (world.ranks // world.tensor_parallel, world.tensor_parallel)
            if world and ranks != (self.data_parallel, self.tensor_parallel):
                raise ValueError(f"dp_world_size and mp_world_size are not {ranks}, as state.json says")
        self._check_files()
        # ZeRO files of another tensor-parallel rank have the same layout: all shards have equal shapes.
        optimizer = self._optimizer(0, 0)
        with understood(self._optimizer_path(0, 0)):
            self._sliced = "fp32_flat_groups" in optimizer  # at stage 3
            settings = self._adam(0, 0)["param_groups"]
            with understood(path):
                self._flats = self._flat_groups(shapes, settings)
            self._pieces = self._locate(optimizer)
            self.groups = {group["name"]: self._group(index, group) for index, group in enumerate(settings)}

    def names(self) -> list[str]:
        return list(self._pieces)

    def tensor(self, name: str, key: str) -> Tensor:
        dimension, rows = self.specs[name].shard_dimension, self.specs[name].shape[0]
        if dimension is None or self.tensor_parallel == 1:
            whole = self._read(name, key, 0)
        else:
            whole = torch.empty(self._full_shape(name))
            for rank in range(self.tensor_parallel):  # copied straight into its place: never two full copies
                part = self._read(name, key, rank)
                length = part.shape[dimension]
                whole.narrow(dimension, rank * length, length).copy_(part)
        return whole[:rows]  # only vocabularies are longer, and the added rows are padding

    def step(self, name: str) -> int:
        return int(self._adam_state(self._pieces[name][0], 0).get("step", 0))

    def check(self, part: int, parts: int) -> None:
        places = itertools.product(range(self.tensor_parallel), range(self.data_parallel))
        for place in itertools.islice(places, part, None, parts):
            path = self._model_path(*place)
            model_states = load_safely(path)
            with understood(path):
                wrong = [key for key in OF_ALL if model_states[key] != self._first[key]]
                if not self._sliced:  # at stage 3 the weights are partitioned, too, and not stored here
                    shapes = {name: list(model_states["module"][name].shape) for name in self.specs}
                    wrong += [name for name, shape in shapes.items() if shape != self._shard_shape(name)]
                if wrong:
                    raise ValueError(f"{wrong[0]} is not as on the other ranks")
            with understood(self._optimizer_path(*place)):
                self._check_sizes(*place)
            self.release()

    def _check_sizes(self, tensor_rank: int, rank: int) -> None:
        """Raise an error of any class if a flat tensor of a rank is shorter than what lies in it."""
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        masters = self._masters(self._optimizer(tensor_rank, rank))
        adam = self._adam(tensor_rank, rank)
        states, groups = adam["state"], adam["param_groups"]
        if any(piece.rank >= self.data_parallel for piece in pieces):
            raise ValueError("the first rank's part is cut short")
        for index, flat in enumerate(self._flats):
            least = max((p.offset + p.numel for p in pieces if (p.flat, p.rank) == (index, rank)), default=0)
            tensors = {MASTERS: masters[index]}
            if states:
                tensors |= {key: states[flat.state][key] for key in moments_of(groups[flat.group])}
            for key, tensor in tensors.items():
                if tensor.dtype != torch.float32 or tensor.dim() != 1 or tensor.numel() < least:
                    raise ValueError(f"{key} {index} holds {tensor.numel():,} of {least:,} numbers in fp32")

    def release(self) -> None:
        """Unmap the files, and with them the memory of what was read; they are mapped again when needed."""
        self._files.clear()
        self._touched = 0

    def _read(self, name: str, key: str, tensor_rank: int) -> Tensor:
        """A tensor of a parameter as a tensor-parallel rank had it: fp32, of its shape there, a copy.

        Moments of an optimizer that never stepped are zero.
        """
        shape = self._shard_shape(name)
        out = torch.zeros(math.prod(shape))
        for piece in self._pieces[name]:
            flat = self._flat(piece, key, tensor_rank)
            if flat is None:
                continue
            source = flat[piece.offset : piece.offset + piece.numel]
            if source.numel() != piece.numel:
                raise UserError(
                    f"checkpoint: {key} of {name} is cut short on rank {piece.rank} in {self.folder}"
                )
            out[piece.start : piece.start + piece.numel].copy_(source)
            self._touched += source.nbytes
        if self._touched > RELEASE_AFTER:
            self.release()
        return out.view(shape)

    def _flat(self, piece: Piece, key: str, tensor_rank: int) -> Tensor | None:
        """The flat tensor that a piece lies in; None for moments that do not exist yet."""
        if key == MASTERS:
            return self._masters(self._optimizer(tensor_rank, piece.rank))[piece.flat]
        return self._adam_state(piece, tensor_rank).get(key)

    def _masters(self, optimizer: dict[str, Any]) -> list[Tensor]:
        return optimizer["fp32_flat_groups" if self._sliced else "single_partition_of_fp32_groups"]

    def _adam(self, tensor_rank: int, rank: int) -> dict[str, Any]:
        """State dict of the Adam inside the ZeRO optimizer."""
        optimizer = self._optimizer(tensor_rank, rank)
        return optimizer["optimizer_state_dict" if self._sliced else "base_optimizer_state"]

    def _adam_state(self, piece: Piece, tensor_rank: int) -> dict[str, Any]:
        return self._adam(tensor_rank, piece.rank)["state"].get(self._flats[piece.flat].state, {})

    def _model_path(self, tensor_rank: int, rank: int) -> Path:
        name = f"mp_rank_{tensor_rank:02d}_model_states.pt"
        names = (name, f"zero_pp_rank_{rank}_{name}")  # up to stage 2, at stage 3
        path = next((self.folder / name for name in names if (self.folder / name).is_file()), None)
        if path is None:
            raise UserError(f"checkpoint: {self.folder} holds neither {names[0]} nor {names[1]}")
        return path

    def _optimizer_path(self, tensor_rank: int, rank: int) -> Path:
        name = f"zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
        bf16 = self.folder / f"bf16_{name}"
        return bf16 if bf16.is_file() else self.folder / name

    def _optimizer(self, tensor_rank: int, rank: int) -> dict[str, Any]:
        path = self._optimizer_path(tensor_rank, rank)
        if path not in self._files:
            content = load_safely(path)
            with understood(path):
                self._files[path] = content["optimizer_state_dict"]
        return self._files[path]

    def _check_files(self) -> None:
        paths = (
            self._optimizer_path(tensor_rank, rank)
            for tensor_rank in range(self.tensor_parallel)
            for rank in range(self.data_parallel)
        )
        missing = next((path.name for path in paths if not path.is_file()), None)
        if missing is not None:
            raise UserError(
                f"checkpoint: {self.folder} lacks {missing}; it was written by {self.data_parallel} "
                f"data-parallel x {self.tensor_parallel} tensor-parallel ranks, one file each"
            )

    def _flat_groups(self, shapes: list[dict[str, Any]], settings: list[dict[str, Any]]) -> list[FlatGroup]:
        # Adam numbers its tensors through all groups; each is one flat tensor, in the order of param_shapes.
        numbers = [(index, number) for index, group in enumerate(settings) for number in group["params"]]
        for name, shape in (item for parameters in shapes for item in parameters.items()):
            if name not in self.specs or list(shape) != self._shard_shape(name):
                raise UserError(
                    f"checkpoint: {name} has shape {list(shape)} on a rank in {self.folder}, but not in the "
                    "model it describes; the files are of another model"
                )
        return [
            FlatGroup(group, number, list(parameters))
            for (group, number), parameters in zip(numbers, shapes, strict=True)
        ]

    def _locate(self, optimizer: dict[str, Any]) -> dict[str, list[Piece]]:
        """Find the pieces of flat tensors that every parameter consists of."""
        pieces: dict[str, list[Piece]] = {}
        paddings = optimizer.get("param_alignment_paddings")
        for index, flat in enumerate(self._flats):
            numels = [(name, math.prod(self._shard_shape(name))) for name in flat.parameters]
            if self._sliced:
                pieces |= sliced_pieces(index, numels, self.data_parallel)
                continue
            # Masters are stored without the padding at the end, moments with it, and only the last ranks are
            # padded: the first rank's part has its full length unless no other rank has elements.
            length = self._masters(optimizer)[index].numel()
            pieces |= contiguous_pieces(index, numels, paddings[index] if paddings else None, length)
        return pieces

    def _group(self, index: int, settings: dict[str, Any]) -> ParameterGroup:
        """Adam's group of an index, with its hyperparameters."""
        parameters = [name for flat in self._flats if flat.group == index for name in flat.parameters]
        no_settings = ("name", "params", "parameter_names")
        hyperparameters = {key: value for key, value in settings.items() if key not in no_settings}
        return ParameterGroup(parameters, hyperparameters)

    def _full_shape(self, name: str) -> list[int]:
        """A parameter's shape over all tensor-parallel ranks, the vocabulary padded for them."""
        spec = self.specs[name]
        shape = list(spec.shape)
        if spec.vocabulary:
            multiple = math.lcm(VOCABULARY_MULTIPLE, self.tensor_parallel)
            shape[0] = -(-shape[0] // multiple) * multiple
        return shape

    def _shard_shape(self, name: str) -> list[int]:
        """A parameter's shape on one tensor-parallel rank."""
        shape, dimension = self._full_shape(name), self.specs[name].shard_dimension
        if dimension is not None:
            shape[dimension] //= self.tensor_parallel
        return shape
