"""DeepSpeed's universal checkpoints: what its converter has to know of ours, and reading what it makes of them.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP/deepspeed --output_folder STEP/universal

writes ``zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`` for every parameter. Stages 1 and 2, and stage 3 with tensor
parallelism, become full tensors with a dictionary around them; stage 3 without becomes bare flat tensors, and its step
count stays in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.errors import UserError
from pretrain.checkpoint.deepspeed_files import MASTERS, MOMENTS, load_safely

if TYPE_CHECKING:
    from pretrain.checkpoint.unsharded import ParameterSpec


def universal_info(specs: Mapping[str, ParameterSpec], vocab_size: int) -> dict[str, Any]:
    """How the tensor-parallel parts of each parameter join, as DeepSpeed's converter reads it in a checkpoint.

    The converter matches patterns from a name's start, and refuses one that matches nothing. Parameters without a
    pattern are joined along dimension 0; of vocabularies it keeps the first *vocab_size* rows.
    """
    from deepspeed.checkpoint import constants

    cut = {name: spec.shard_dimension for name, spec in specs.items()}
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.TP_REPLICATED_PARAMETER_PATTERNS: _patterns(name for name in cut if cut[name] is None),
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: _patterns(name for name in cut if cut[name] == 1),
        constants.VOCABULARY_PARAMETER_PATTERNS: _patterns(name for name in cut if specs[name].vocabulary),
        constants.ORIGINAL_VOCAB_SIZE: vocab_size,
    }


def _patterns(names: Iterable[str]) -> list[str]:
    """Anchored patterns that match the names; those of all layers share one."""
    numbered = (re.sub(r"^layers\\\.\d+\\\.", r"layers\\.\\d+\\.", re.escape(name)) for name in names)
    return [f"^{pattern}$" for pattern in dict.fromkeys(numbered)]


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
