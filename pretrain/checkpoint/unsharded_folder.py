"""Writes and reads checkpoints of weights alone: how models made elsewhere (imported) enter a run.

    step_000000/
      state.json  manifest.json  tokenizer/                  as in every checkpoint
      canonical/layers.0.attention.q.weight.safetensors      fp32, in full shape
      …

A run continues from one as from any other checkpoint, in any world; Adam begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.errors import UserError
from model.parameters import ParameterSpec
from pretrain.checkpoint.deepspeed_files import MASTERS
from pretrain.checkpoint.manifest import write_manifest
from pretrain.checkpoint.source import ParameterGroup
from pretrain.checkpoint.state import TrainingState
from pretrain.utils.files import atomic_folder, copy_folder, file_entry, write_atomically

CANONICAL_FOLDER = "canonical"  # the name that run folders have had from the beginning


def write_unsharded(
    target: Path, state: TrainingState, weights: Iterable[tuple[str, Tensor]], tokenizer_folder: Path
) -> None:
    """Write a checkpoint of weights, with one of them in memory at a time.

    Args:
        target: the checkpoint's folder; one that exists is replaced when the new one is complete.
        state: its TrainingState, whose ``model`` determines the parameters.
        weights: every parameter of the model by name, fp32, full shape, in any order.
        tokenizer_folder: copied into the checkpoint.

    Raises:
        OSError: a file cannot be written. Nothing is left behind then, and an existing *target* stays.
    """
    with atomic_folder(target) as partial:
        (partial / CANONICAL_FOLDER).mkdir()
        copy_folder(tokenizer_folder, partial / "tokenizer")
        for name, weight in weights:
            save_file({MASTERS: weight.detach().contiguous()}, _file(partial / CANONICAL_FOLDER, name))
        write_atomically(partial / "state.json", state.to_json())
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        write_manifest(partial, {f.relative_to(partial).as_posix(): file_entry(f) for f in files})


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


class FolderSource:
    """Tensors from a ``canonical`` folder."""

    def __init__(self, folder: Path, specs: dict[str, ParameterSpec]) -> None:
        self.folder, self.specs = folder, specs
        self.groups: dict[str, ParameterGroup] = {}

    def names(self) -> list[str]:
        return [path.stem for path in self.folder.glob("*.safetensors")]

    def tensor(self, name: str, key: str) -> Tensor:
        shape = self.specs[name].shape
        if key != MASTERS:
            return torch.zeros(shape)
        with safe_open(_file(self.folder, name), framework="pt") as file:
            tensor: Tensor = file.get_tensor(key).clone()
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise UserError(
                f"checkpoint: {name} is {tensor.dtype} {list(tensor.shape)} in {self.folder}, its model says "
                f"fp32 {list(shape)}"
            )
        return tensor

    def step(self, name: str) -> int:
        return 0

    def check(self, part: int, parts: int) -> None:
        for name in sorted(self.specs)[part::parts]:
            self.tensor(name, MASTERS)

    def release(self) -> None:
        """Nothing stays mapped between reads."""
