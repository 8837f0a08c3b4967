"""Reads DeepSpeed's universal checkpoints, which its converter makes from ours.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP/deepspeed --output_folder STEP/universal

writes ``zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`` for every parameter. Stages 1 and 2, and stage 3 with tensor
parallelism, become full tensors with a dictionary around them; stage 3 without becomes bare flat tensors, and its step
count stays in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.errors import UserError
from model.parameters import ParameterSpec
from pretrain.checkpoint.deepspeed_files import MASTERS, MOMENTS, load_safely
from pretrain.checkpoint.source import (
    ParameterGroup,
    hyperparameters,
    without_padding,
)

if TYPE_CHECKING:
    pass


class UniversalFolder:
    """A folder that DeepSpeed's converter wrote.

    Args:
        folder: the one that holds ``zero/``.

    Raises:
        UserError: files are missing or damaged, or were written in a way that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "zero"
        if not self.folder.is_dir():
            raise UserError(
                f"checkpoint: {folder} holds no zero/; DeepSpeed's ds_to_universal did not finish there"
            )
        self._common = load_safely(self.folder / "optimizer_state.pt")
        try:
            self.group_settings: list[dict[str, Any]] = self._common["param_groups"]
            self.groups = {group["name"]: list(group["parameter_names"]) for group in self.group_settings}
        except (KeyError, TypeError) as error:
            raise UserError(
                f"checkpoint: {self.folder}/optimizer_state.pt names no groups of parameters ({error}); it was not "
                "made from a checkpoint of this program"
            ) from None

    def names(self) -> list[str]:
        """Names of the parameters, whose weights and moments all exist.

        Raises:
            UserError: one lacks its weight or a moment.
        """
        names = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        for name in names:
            for key in (MASTERS, *MOMENTS):
                if not (path := self.folder / name / f"{key}.pt").is_file():
                    raise UserError(f"checkpoint: {path} is missing; run DeepSpeed's ds_to_universal again")
        return names

    def read(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter, mapped from disk: fp32, in full shape or flat, vocabulary rows unchanged.

        Args:
            key: MASTERS or one of MOMENTS.
        """
        path = self.folder / name / f"{key}.pt"
        content = load_safely(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            what = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"checkpoint: {path} holds {what}, not an fp32 tensor")
        return tensor

    def step(self, name: str) -> int:
        """Updates that Adam has applied to a parameter.

        Raises:
            UserError: the folder does not record it.
        """
        path = self.folder / name / "step.pt"
        if path.is_file():
            return int(load_safely(path))
        # Stage 3 keeps one count for each flat tensor of rank 0; all are stepped together.
        states = self._common.get("optimizer_state_dict", {}).get("state", {})
        steps = {int(state["step"]) for state in states.values() if "step" in state}
        if len(steps) != 1:
            raise UserError(
                f"checkpoint: {path} is missing, and {self.folder}/optimizer_state.pt has no step"
            )
        return steps.pop()


class UniversalSource:
    """Tensors from a folder that DeepSpeed's converter wrote, which joined the ranks' parts already."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec], vocab_size: int) -> None:
        self.folder, self.specs, self.vocab_size = folder, specs, vocab_size
        self.universal = UniversalFolder(folder)
        self._names = self.universal.names()
        self.groups = {
            settings["name"]: ParameterGroup(
                settings["name"], self.universal.groups[settings["name"]], hyperparameters(settings)
            )
            for settings in self.universal.group_settings
        }

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str, key: str) -> Tensor:
        spec = self.specs[name]
        stored = self.universal.read(name, key)
        rows = spec.shape[0]
        if stored.ndim == 1 < len(spec.shape) and stored.numel() % math.prod(spec.shape[1:]) == 0:
            stored = stored.view(-1, *spec.shape[1:])  # flat, as stage 3 leaves it
        if spec.vocabulary and stored.shape[0] == self.vocab_size < rows:
            padded = torch.zeros(spec.shape)
            padded[: self.vocab_size] = stored
            return padded
        whole = without_padding(stored, spec, name, self.folder)
        if tuple(whole.shape) != spec.shape:
            raise UserError(
                f"checkpoint: {key} of {name} has shape {list(stored.shape)} in {self.folder}, its model says "
                f"{list(spec.shape)}; ds_to_universal did not know how the tensor-parallel parts of this parameter join"
            )
        return whole.clone() if whole is stored else whole

    def step(self, name: str) -> int:
        return self.universal.step(name)

    def release(self) -> None:
        """Nothing stays mapped between reads."""
