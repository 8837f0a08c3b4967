"""The tensor files of a checkpoint, and the index that says where in them each parameter lies.

    step_000200/weights_and_optimizer/
      index.json               Index
      rank_00000.safetensors   the flat tensors of rank 0: fp32.0, exp_avg.0, exp_avg_sq.0, fp32.1, …
      …

docs/checkpoints.md describes the format for other programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from model.declared import NonNegativeFloat, NonNegativeInt, PositiveInt, declared, from_dict, to_dict
from pretrain.optim.muon import Moment
from pretrain.utils.parsing import read_text

TENSORS_FOLDER = "weights_and_optimizer"
INDEX = "index.json"
MASTERS = "fp32"

HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps")
"""What the index holds of a group."""
RESTORED = ("lr", "weight_decay")
"""Of these, what holds until the next step sets it; the others are those of the run's settings, which may
have changed."""

Piece = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt]
"""A range of a parameter's elements: rank (file), number of the flat tensor, first element in it, length."""


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def flat_name(key: str, number: int) -> str:
    """Name of a flat tensor in a rank's file.

    Args:
        key: MASTERS or one of the optimizer's moments.
        number: of the flat tensor.
    """
    return f"{key}.{number}"


@declared("group", frozen=True)
class Group:
    """An optimizer group."""

    lr: NonNegativeFloat
    weight_decay: NonNegativeFloat
    betas: tuple[NonNegativeFloat, NonNegativeFloat]
    eps: NonNegativeFloat
    moments: list[Moment]
    """What the files hold of its parameters besides MASTERS. Muon's momentum is exp_avg."""
    kind: Literal["adamw", "muon"] = "adamw"


@declared("parameter")
class Parameter:
    """Where a parameter is. Its shards, each the concatenation of its pieces in shard_shape, are concatenated
    along dimension ``split``; rows beyond ``shape`` are padding of the vocabulary."""

    group: str | None
    """None in a checkpoint of weights alone."""
    step: NonNegativeInt
    """Updates that the optimizer has applied to it."""
    shape: list[NonNegativeInt]
    shard_shape: list[NonNegativeInt]
    """Of one tensor-parallel rank."""
    split: NonNegativeInt | None
    """None: there is one shard, since every tensor-parallel rank holds the whole parameter."""
    shards: list[list[Piece]]
    """In the order of tensor-parallel ranks; of each, its pieces in the order of their elements."""


@declared("index")
class Index:
    """The contents of index.json."""

    ranks: PositiveInt
    """Number of files."""
    tensor_parallel: PositiveInt
    """Rank = data-parallel rank x tensor_parallel + tensor-parallel rank."""
    groups: dict[str, Group]
    parameters: Annotated[dict[str, Parameter], Field(min_length=1)]
    """In the model's order."""
    format: Literal[1] = 1

    def to_json(self) -> str:
        """The text of index.json."""
        return json.dumps(to_dict(self))


def read_index(folder: Path) -> Index:
    """Read the index in a checkpoint's TENSORS_FOLDER.

    Raises:
        UserError: it is missing or damaged.
    """
    path = folder / INDEX
    # It has as many numbers as there are ranks and parameters, so there is no limit but that of the bytes.
    return from_dict(Index, json.loads(read_text(path, "checkpoint")), f"checkpoint: {path}")
