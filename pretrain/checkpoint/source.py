"""The interface of all readers of checkpoint tensors: of files, and of one with heads added or removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


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
        """Check that every file has the tensors, of the size, that it is to have; nothing is read but sizes.

        Args:
            part: which of *parts* equal shares of the files to check (each rank checks its own).

        Raises:
            UserError: it names the file.
        """

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """What pretrain.checkpoint.random_state returned on a rank; empty if it is not stored."""

    def release(self) -> None:
        """Unmap the files that reading has mapped into memory."""
