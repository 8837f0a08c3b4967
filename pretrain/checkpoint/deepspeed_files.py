"""Reads the files of DeepSpeed's ZeRO optimizers, one parameter at a time, without a process group or GPU.

Stages 1 and 2 (DeepSpeedZeroOptimizer, and BF16_Optimizer, which is stage 1 in bf16 with fp32 gradients) and
stage 3, on the device or offloaded to the host, for any number of data- and tensor-parallel ranks.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.errors import UserError, shown
from model.parameters import ParameterSpec
from pretrain.checkpoint.source import (
    ParameterGroup,
    hyperparameters,
    padding_error,
    without_padding,
)
from pretrain.engine.layout import Piece, contiguous_pieces, slice_length, sliced_pieces

# Pages of a mapped file count as this process's memory until it is unmapped: reopen after this many bytes.
RELEASE_AFTER = 256 << 20
MOST_RANKS = 1 << 16
MASTERS = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Inert:
    """Placeholder for a DeepSpeed class in a pickle: stores any arguments and state, does nothing with them."""

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
    try:
        with torch.serialization.safe_globals(ALLOWED):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"checkpoint: {path} is missing") from None
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"checkpoint: {path} holds objects that are not read ({reason})") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise UserError(f"checkpoint: {path} cannot be read ({type(error).__name__})") from None


@dataclass(frozen=True)
class FlatGroup:
    """One flat tensor of every rank: a whole group (stages 1 and 2) or a sub-group of one (stage 3)."""

    group: int
    """Index of the optimizer's group."""
    state: int
    """Key of its Adam state in the optimizer's state dict."""
    parameters: dict[str, tuple[int, ...]]
    """Its parameters in order, with their shapes on one tensor-parallel rank."""


class DeepSpeedShards:
    """The ZeRO files of one checkpoint.

    Args:
        folder: the checkpoint's ``deepspeed`` folder.

    Raises:
        UserError: a file is missing or damaged, or written in a way that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._touched = 0
        model_states = self._model_states(0)
        self.data_parallel, self.tensor_parallel = (
            self._ranks(model_states, key) for key in ("dp_world_size", "mp_world_size")
        )
        self._check_files()
        optimizer = self._optimizer(0, 0)
        self.stage = _stage(optimizer)
        self.group_settings: list[dict[str, Any]] = self._base(optimizer)["param_groups"]
        # ZeRO files of another tensor-parallel rank have the same layout: all shards have equal shapes.
        self.flats = self._flat_groups(model_states["param_shapes"])
        self.pieces = self._locate(optimizer)

    def names(self) -> list[str]:
        """Names of the parameters, in the order of the groups."""
        return list(self.pieces)

    def shard_shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape on one tensor-parallel rank."""
        return self.flats[self.pieces[name][0].flat].parameters[name]

    def group_parameters(self, group: int) -> list[str]:
        """Names of a group's parameters, in order."""
        return [name for flat in self.flats if flat.group == group for name in flat.parameters]

    def read(self, name: str, key: str, tensor_rank: int) -> Tensor:
        """One tensor of a parameter as a tensor-parallel rank had it: fp32, of shard_shape(name), a copy.

        Args:
            key: MASTERS or one of MOMENTS. Moments of an optimizer that never stepped are zero.
        """
        shape = self.shard_shape(name)
        out = torch.empty(math.prod(shape), dtype=torch.float32)
        for piece in self.pieces[name]:
            flat = self._flat(piece, key, tensor_rank)
            part = out[piece.start : piece.start + piece.numel]
            if flat is None:
                part.zero_()
                continue
            if flat.dtype != torch.float32:
                raise UserError(f"checkpoint: {key} of {name} is {flat.dtype} in {self.folder}, not fp32")
            source = flat[piece.offset : piece.offset + piece.numel]
            if source.numel() != piece.numel:
                raise UserError(
                    f"checkpoint: {key} of {name} is cut short on rank {piece.rank} in {self.folder}"
                )
            part.copy_(source)
            self._touched += source.nbytes
        if self._touched > RELEASE_AFTER:
            self.release()
        return out.view(shape)

    def step(self, name: str) -> int:
        """Updates that Adam has applied to a parameter.

        Raises:
            UserError: the ranks do not agree.
        """
        steps = {
            int(state.get("step", 0))
            for tensor_rank in range(self.tensor_parallel)
            for state in [self._adam_state(piece, tensor_rank) for piece in self.pieces[name]]
        }
        if len(steps) != 1:
            raise UserError(
                f"checkpoint: ranks disagree on the step count of {name} in {self.folder}: {steps}"
            )
        return steps.pop()

    def release(self) -> None:
        """Unmap the files, and with them the memory of what was read; they are mapped again when needed."""
        self._files.clear()
        self._touched = 0

    def _flat(self, piece: Piece, key: str, tensor_rank: int) -> Tensor | None:
        """The flat tensor that a piece lies in; None for moments that do not exist yet."""
        if key == MASTERS:
            return _masters(self._optimizer(tensor_rank, piece.rank))[piece.flat]
        return self._adam_state(piece, tensor_rank).get(key)

    def _adam_state(self, piece: Piece, tensor_rank: int) -> dict[str, Any]:
        base = self._base(self._optimizer(tensor_rank, piece.rank))
        return base["state"].get(self.flats[piece.flat].state, {})

    def _base(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """State dict of the Adam inside the ZeRO optimizer."""
        base = optimizer["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, dict):
            raise UserError(
                f"checkpoint: {self.folder} was written with elastic_checkpoint, which is not read; "
                "write it with zero_optimization.elastic_checkpoint false"
            )
        return base

    def _model_states(self, tensor_rank: int) -> dict[str, Any]:
        names = (
            f"mp_rank_{tensor_rank:02d}_model_states.pt",
            f"zero_pp_rank_0_mp_rank_{tensor_rank:02d}_model_states.pt",
        )
        for name in names:
            if (self.folder / name).is_file():
                return load_safely(self.folder / name)
        raise UserError(f"checkpoint: {self.folder} holds neither {names[0]} nor {names[1]}")

    def _ranks(self, states: dict[str, Any], key: str) -> int:
        ranks = states[key]
        if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
            raise UserError(
                f"checkpoint: {key} is {shown(ranks)} in {self.folder}; it must be a number of ranks"
            )
        return ranks

    def _optimizer_path(self, tensor_rank: int, rank: int) -> Path:
        name = f"zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
        bf16 = self.folder / f"bf16_{name}"
        return bf16 if bf16.is_file() else self.folder / name

    def _optimizer(self, tensor_rank: int, rank: int) -> dict[str, Any]:
        path = self._optimizer_path(tensor_rank, rank)
        if path not in self._files:
            self._files[path] = load_safely(path)["optimizer_state_dict"]
        return self._files[path]

    def _check_files(self) -> None:
        paths = [
            self._optimizer_path(tensor_rank, rank)
            for tensor_rank in range(self.tensor_parallel)
            for rank in range(self.data_parallel)
        ]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"checkpoint: {self.folder} lacks {missing[0]}{more}; it was written by {self.data_parallel} "
                f"data-parallel x {self.tensor_parallel} tensor-parallel ranks, one file each"
            )

    def _flat_groups(self, shapes: list[dict[str, Any]]) -> list[FlatGroup]:
        # Adam numbers its tensors through all groups; each is one flat tensor, in the order of param_shapes.
        numbers = [
            (index, number) for index, group in enumerate(self.group_settings) for number in group["params"]
        ]
        if len(numbers) != len(shapes) or (
            self.stage == 3 and numbers != sorted(numbers, key=lambda n: n[1])
        ):
            raise UserError(
                f"checkpoint: {self.folder} has {len(shapes)} groups of parameters, Adam has {len(numbers)}"
            )
        return [
            FlatGroup(group, number, {name: tuple(shape) for name, shape in parameters.items()})
            for (group, number), parameters in zip(numbers, shapes, strict=True)
        ]

    def _locate(self, optimizer: dict[str, Any]) -> dict[str, list[Piece]]:
        """Find the pieces of flat tensors that every parameter consists of."""
        pieces: dict[str, list[Piece]] = {}
        paddings = optimizer.get("param_alignment_paddings")
        for index, flat in enumerate(self.flats):
            numels = [(name, math.prod(shape)) for name, shape in flat.parameters.items()]
            if self.stage == 3:
                expected = sum(slice_length(numel, self.data_parallel) for _, numel in numels)
                actual = _masters(optimizer)[index].numel()
                if expected != actual:
                    raise UserError(
                        f"checkpoint: a flat tensor in {self.folder} has {actual} elements where its "
                        f"parameters make {expected}; weights swapped to NVMe are not read"
                    )
                pieces |= sliced_pieces(index, numels, self.data_parallel)
            else:
                # Masters are stored without the padding at the end, moments with it, and only the last ranks
                # are padded: the first rank's part has its full length unless no other rank has elements.
                partition = _masters(optimizer)[index].numel()
                if (expected := sum(numel for _, numel in numels)) > partition * self.data_parallel:
                    raise UserError(
                        f"checkpoint: flat tensors of {self.data_parallel} x {partition} elements in {self.folder} "
                        f"cannot hold their parameters, which make {expected}"
                    )
                pieces |= contiguous_pieces(index, numels, paddings[index] if paddings else None, partition)
        return pieces


def _stage(optimizer: dict[str, Any]) -> int:
    if "fp32_flat_groups" in optimizer:
        return 3
    if "single_partition_of_fp32_groups" not in optimizer:
        raise UserError(
            "checkpoint: the optimizer file holds no fp32 weights; was it written by ZeRO 1, 2 or 3?"
        )
    # The files of stages 1 and 2 are alike; BF16_Optimizer, which does not say, is stage 1.
    stage = optimizer.get("zero_stage")
    return stage.arguments[0] if isinstance(stage, _Inert) else 1


def _masters(optimizer: dict[str, Any]) -> list[Tensor]:
    if "fp32_flat_groups" in optimizer:
        return optimizer["fp32_flat_groups"]
    return optimizer["single_partition_of_fp32_groups"]


class ShardedSource:
    """Tensors from DeepSpeed's files, joined over data-parallel and tensor-parallel ranks."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec]) -> None:
        self.folder, self.specs = folder, specs
        self.shards = DeepSpeedShards(folder)
        self.groups = {
            settings["name"]: ParameterGroup(
                settings["name"],
                self.shards.group_parameters(index),
                hyperparameters(settings),
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
            return without_padding(self.shards.read(name, key, 0), spec, name, self.folder)
        whole = torch.empty(spec.shape)
        start = 0
        for rank in range(ranks):  # copied straight into its place: never two full copies
            part = self.shards.read(name, key, rank)
            length = part.shape[spec.shard_dimension]
            real_length = min(length, max(0, spec.shape[spec.shard_dimension] - start))
            whole.narrow(
                spec.shard_dimension, min(start, spec.shape[spec.shard_dimension]), real_length
            ).copy_(part.narrow(spec.shard_dimension, 0, real_length))
            if (
                real_length < length
                and part.narrow(spec.shard_dimension, real_length, length - real_length).any()
            ):
                raise padding_error(name, self.folder)
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
