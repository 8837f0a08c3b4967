"""Writes checkpoints of weights alone: how models made elsewhere (imported) enter a run.

The format is that of all checkpoints, with one file and no optimizer state. A run continues from one as from
any other; its optimizer begins at step 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.parameters import parameter_specs
from pretrain.checkpoint.index import INDEX, MASTERS, TENSORS_FOLDER, Index, Parameter, flat_name, rank_file
from pretrain.checkpoint.manifest import write_manifest
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.writer import TensorFile
from pretrain.utils.files import atomic_folder, copy_folder, file_entry, write_atomically


def write_weights(
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
    specs = parameter_specs(ModelConfig.from_json(state.model))
    total = sum(spec.numel for spec in specs.values())
    parameters, offset = {}, 0
    with atomic_folder(target) as partial:
        (partial / TENSORS_FOLDER).mkdir()
        copy_folder(tokenizer_folder, partial / "tokenizer")
        described = {flat_name(MASTERS, 0): torch.empty(total, device="meta")}
        file = TensorFile(partial / TENSORS_FOLDER / rank_file(0), described)
        try:
            for name, weight in weights:
                file.write(weight)
                shape, piece = list(weight.shape), (0, 0, offset, weight.numel())
                parameters[name] = Parameter(None, 0, shape, shape, None, [[piece]])
                offset += weight.numel()
            file.finish()
        finally:
            file.close()
        index = Index(1, 1, {}, {name: parameters[name] for name in specs})
        write_atomically(partial / TENSORS_FOLDER / INDEX, index.to_json())
        write_atomically(partial / "state.json", state.to_json())
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        write_manifest(partial, {f.relative_to(partial).as_posix(): file_entry(f) for f in files})
