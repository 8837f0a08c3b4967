"""DeepSpeed's universal checkpoints: what its converter has to know of ours, and reading what it makes of them.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP/deepspeed --output_folder STEP/universal

writes ``zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`` for every parameter. Stages 1 and 2, and stage 3 with tensor
parallelism, become full tensors with a dictionary around them; stage 3 without becomes bare flat tensors, and its step
count stays in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.errors import UserError
from pretrain.checkpoint.deepspeed_files import MASTERS, MOMENTS, load_safely

if TYPE_CHECKING:
    pass


class UniversalFolder:
    """A folder that DeepSpeed's converter wrote.

    Args:
        folder: the one that holds ``zero/``.

    Raises:
        UserError: files are missing or damaged, or were written in a way that is not read here.
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
        """Parameters of which everything is there.

        Raises:
            UserError: one lacks its weight or a moment.
        """
        found = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        for name in found:
            for key in (MASTERS, *MOMENTS):
                if not (path := self.folder / name / f"{key}.pt").is_file():
                    raise UserError(f"checkpoint: {path} is missing; run DeepSpeed's ds_to_universal again")
        return found

    def read(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter, mapped from disk: fp32, in full shape or flat, vocabulary rows as they are.

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
            UserError: the folder does not say.
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
