"""Measures how far weights have moved, in all and in the last update, on the optimizer's own fp32 masters.

Every rank measures the pieces that it owns (ZeRO partitions of its tensor-parallel shard) and the sums are
added up, so nothing is gathered, at any stage and degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ModelConfig
from model.initialization import initial_value
from model.parameters import ParameterSpec
from pretrain.checkpoint.loader import take_shard
from pretrain.engine.layout import engine_flats, inner_optimizer, shard_shapes, tensor_place
from pretrain.optim.muon import MOMENTS, is_muon
from pretrain.runtime.world import World
from pretrain.utils.files import atomic_file, remove_leftovers

Pieces = dict[str, list[Tensor]]
"""By parameter: this rank's pieces of it, flat."""


def projections(model: ModelConfig) -> list[str]:
    """Names of W_Q and W_K of every layer that has attention, the q's first."""
    return [f"layers.{layer}.attention.{part}.weight" for part in "qk" for layer in model.attention_layers]


def displacement(weight: Tensor, reference: Tensor) -> float:
    """‖W - W'‖_F / ‖W'‖_F: the relative displacement λ of one weight from a reference.

    This is how we read λ_Q and λ_K of arXiv 2605.10504; the paper's own definition is not public.
    """
    moved = torch.linalg.vector_norm(weight.double() - reference.double())
    return (moved / torch.linalg.vector_norm(reference.double())).item()


def initial_weights(
    model: ModelConfig, specs: dict[str, ParameterSpec], seed: int, dtype: torch.dtype
) -> Callable[[str], Tensor]:
    """Return a function from a parameter's name to its value at step 0: fp32, full shape, drawn again from
    the seed.

    Drawing it again is cheaper than keeping it. The optimizer's masters begin as copies of the weights that
    the model computes with, so in bf16 (*dtype*) they begin rounded.
    """

    def initial(name: str) -> Tensor:
        spec = specs[name]
        return initial_value(name, spec.role, spec.shape, model, seed).to(dtype).float()

    return initial


class OwnWeights:
    """This rank's pieces of the named parameters inside a DeepSpeed engine.

    Args:
        engine: a DeepSpeedEngine.
        names: the parameters.
        specs: the model's, from model.parameters.parameter_specs.
    """

    def __init__(self, engine: Any, names: Iterable[str], specs: dict[str, ParameterSpec]) -> None:
        self.names, self.specs = list(names), specs
        self.shapes = shard_shapes(engine)
        self.tensor_parallel, self.tensor_rank = tensor_place(engine)
        # Views of the masters, and where each begins in the flat shard of this rank's tensor group.
        self._pieces: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in self.names}
        for flat in engine_flats(engine):
            for name in flat.pieces.keys() & self._pieces.keys():
                for piece in flat.pieces[name]:
                    view = flat.master.data[piece.offset : piece.offset + piece.numel]
                    self._pieces[name].append((view, piece.start))

    def copy(self) -> Pieces:
        """Copies of this rank's pieces of the masters, on the CPU."""
        return {name: [view.cpu().clone() for view, _ in pieces] for name, pieces in self._pieces.items()}

    def take_pieces(self, full: Callable[[str], Tensor]) -> Pieces:
        """Cut this rank's pieces out of other tensors of the same parameters.

        *full* returns one in full shape; it is only called for those of which this rank has a piece.
        """
        found: Pieces = {name: [] for name in self._pieces}
        for name, pieces in self._pieces.items():
            if pieces:
                place = (self.tensor_parallel, self.tensor_rank, self.shapes[name])
                shard = take_shard(full(name), self.specs[name], *place).flatten()
                found[name] = [shard[start : start + view.numel()].clone() for view, start in pieces]
        return found

    def displacements(self, reference: Pieces) -> dict[str, float]:
        """Displacement λ of every parameter from a reference, of which every rank has its pieces.
        Collective."""
        sums = torch.zeros(len(self.names), 2, dtype=torch.float64)
        for index, (name, pieces) in enumerate(self._pieces.items()):
            for (view, _), before in zip(pieces, reference[name], strict=True):
                difference = view - before.to(view.device)
                sums[index, 0] += torch.linalg.vector_norm(difference, dtype=torch.float64).square().cpu()
                sums[index, 1] += torch.linalg.vector_norm(before, dtype=torch.float64).square()
        moved, whole = _sum_over_ranks(sums).sqrt().unbind(1)
        return dict(zip(self.names, (moved / whole).tolist(), strict=True))

    def gather_full(self, world: World) -> Iterator[tuple[str, Tensor]]:
        """Yield the masters of matrices of the blocks in full shape, one at a time, on the CPU of every rank.
        Collective."""
        for name, pieces in self._pieces.items():
            shape, dimension = self.shapes[name], self.specs[name].shard_dimension
            parts = self.tensor_parallel if dimension is not None else 1
            shards = torch.zeros(parts, math.prod(shape), device=world.device)
            if self.tensor_rank < parts:  # what is not cut is the same on all t ranks
                for view, start in pieces:
                    shards[self.tensor_rank, start : start + view.numel()].copy_(view)
            if world.size > 1:
                dist.all_reduce(shards)
            yield name, torch.cat(shards.view(parts, *shape).unbind(), dimension or 0).cpu()


def displacement_row(displacements: Mapping[str, float], reference: str) -> dict[str, float]:
    """Turn displacements by weight name into rows ``diagnostics/lambda_q_REFERENCE/layer_N``."""
    row = {}
    for name, value in displacements.items():
        _, layer, _, part, _ = name.split(".")
        row[f"diagnostics/lambda_{part}_{reference}/layer_{layer}"] = value
    return row


class Update(NamedTuple):
    """What the last update did to a parameter, to a part of one, or to several."""

    group: str
    moved: float
    """lr · ‖u‖"""
    weight: Tensor
    elements: int
    """Number of them, padding not included."""
    share: float = 1.0
    """How much of it counts: of a parameter that t ranks hold alike 1 / t on each."""


def update_row(groups: Sequence[str], updates: Iterable[Update]) -> dict[str, float]:
    """How far the last update moved every optimizer group that has been stepped. Collective.

    ``diagnostics/effective_lr``: lr · rms(u), by which a weight of the group moved on average;
    ``diagnostics/relative_update``: lr · ‖u‖ / ‖W‖. AdamW's step is lr · u with u = m̂ / (sqrt(v̂) + eps),
    weight decay apart (Loshchilov & Hutter 2019, algorithm 2); Muon's u is what it has made of its momentum.
    """
    sums = torch.zeros(len(groups), 3, dtype=torch.float64)  # ‖lr u‖², ‖W‖² and number of elements
    for group, moved, weight, elements, share in updates:
        size = torch.linalg.vector_norm(weight, dtype=torch.float64).item()
        terms = torch.tensor([moved**2, size**2, elements], dtype=torch.float64)
        sums[groups.index(group)] += share * terms
    row = {}
    for name, (moved, whole, count) in zip(groups, _sum_over_ranks(sums).tolist(), strict=True):
        if count:
            row[f"diagnostics/effective_lr/{name}"] = math.sqrt(moved / count)
            row[f"diagnostics/relative_update/{name}"] = math.sqrt(moved / whole) if whole else math.nan
    return row


def engine_update_row(engine: Any, specs: dict[str, ParameterSpec]) -> dict[str, float]:
    """``update_row`` of the groups of a DeepSpeed engine. Collective."""
    adam, (tensor_parallel, _) = inner_optimizer(engine), tensor_place(engine)

    def updates() -> Iterator[Update]:
        for flat in engine_flats(engine):
            state = adam.state.get(flat.master)
            if not state or "exp_avg" not in state:
                continue
            if is_muon(flat.group):
                if "update_norm" in state:  # not after a change of shape, until the next step
                    moved = flat.group["lr"] * state["update_norm"].item()
                    elements = sum(piece.numel for pieces in flat.pieces.values() for piece in pieces)
                    yield Update(flat.group["name"], moved, flat.master.data, elements)
                continue
            for name, pieces in flat.pieces.items():
                # Parameters that tensor parallelism does not cut are the same on all t ranks.
                share = 1 if specs[name].shard_dimension is not None else 1 / tensor_parallel
                for piece in pieces:
                    part = slice(piece.offset, piece.offset + piece.numel)
                    first, second = (state[key][part] for key in MOMENTS)
                    moved = update_norm(first, second, int(state["step"]), flat.group)
                    yield Update(flat.group["name"], moved, flat.master.data[part], piece.numel, share)

    return update_row([group["name"] for group in adam.param_groups], updates())


def update_norm(exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: dict[str, Any]) -> float:
    """lr · ‖m̂ / (sqrt(v̂) + eps)‖ of a tensor whose moments have been updated *step* times."""
    first, second = group["betas"]
    root = (exp_avg_sq / (1 - second**step)).sqrt_().add_(group["eps"])
    size = torch.linalg.vector_norm(exp_avg / root, dtype=torch.float64).item() / (1 - first**step)
    return group["lr"] * size


def _sum_over_ranks(sums: Tensor) -> Tensor:
    """Sum over all ranks; every piece of a cut parameter is on one of them."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        sums = sums.to(device)
        dist.all_reduce(sums)
    return sums.cpu()


# ---------------------------------------------------------------------- kept weights


def kept_path(run_folder: Path, step: int) -> Path:
    """Path of the weights kept at a release: one file per run, next to its checkpoints."""
    return run_folder / "release" / f"step_{step:06d}.safetensors"


def write_kept(path: Path, tensors: dict[str, Tensor]) -> str | None:
    """Write weights atomically; return the error message, or None."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        with atomic_file(path) as partial:
            save_file(tensors, partial)
    except (OSError, SafetensorError) as error:
        return f"cannot write {path} ({getattr(error, 'strerror', None) or error})"
    return None


def read_kept(
    path: Path, specs: dict[str, ParameterSpec], names: Iterable[str]
) -> Callable[[str], Tensor] | None:
    """The kept weights by name, fp32 in full shape; None if the file is missing or does not fit."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    fits = all(name in tensors and tensors[name].shape == specs[name].shape for name in names)
    return tensors.__getitem__ if fits else None
