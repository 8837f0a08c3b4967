"""The interface of all readers of checkpoint tensors, for any kind of files."""

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
        """Names of the parameters in the files."""

    def tensor(self, name: str, key: str) -> Tensor:
        """MASTERS or one of MOMENTS of a parameter, in full."""

    def step(self, name: str) -> int:
        """Updates that Adam has applied to it."""

    def release(self) -> None:
        """Unmap the files that reading has mapped into memory."""
