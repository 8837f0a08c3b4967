"""Writes weights to safetensors files, one tensor in memory at a time.

The library's own ``save_file`` and ``serialize_file`` take all tensors of a file at once, and those of padded
Llama and of GPT-2 folders are copies: up to four times the weights. The format is simple: the header's length
(8 bytes, little-endian), a JSON header with each tensor's dtype, shape and place, then the bytes. Which
tensor goes into which file is huggingface_hub's choice.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.errors import UserError
from pretrain.hf.formats import ExportedTensor

SHARD_BYTES = 5_000_000_000
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX_FILE = "model.safetensors.index.json"


def total_bytes(tensors: Sequence[ExportedTensor], dtype: torch.dtype) -> int:
    """Bytes of all tensors together."""
    return sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize


def write_weights(
    folder: Path,
    tensors: Sequence[ExportedTensor],
    source: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write *tensors* as model.safetensors, or as several files with an index when larger than *shard_bytes*.

    Args:
        source: one of our parameters by name, fp32, without padded vocabulary rows.

    Returns:
        The names of the weight files.

    Raises:
        UserError: a weight is not finite in *dtype*.
        OSError: the disk is full or cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    by_name = {tensor.name: tensor for tensor in tensors}
    shapes = {tensor.name: torch.empty(tensor.shape, dtype=dtype, device="meta") for tensor in tensors}
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for file, names in files.filename_to_tensors.items():
        _write_file(folder / file, [by_name[name] for name in names], source, dtype)
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(files.filename_to_tensors)


def _write_file(
    path: Path, tensors: list[ExportedTensor], source: Callable[[str], Tensor], dtype: torch.dtype
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        place = {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[tensor.name] = place
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors:
            value = tensor.build(*(source(name) for name in tensor.sources)).to(dtype).contiguous()
            assert tuple(value.shape) == tensor.shape, f"{tensor.name}: {tuple(value.shape)}"
            if not torch.isfinite(value).all():
                name = str(dtype).removeprefix("torch.")
                raise UserError(
                    f"weights: {' and '.join(tensor.sources)} are not finite in {name}; "
                    "valid: --dtype float32, or an earlier --step if the run has diverged"
                )
            file.write(value.flatten().view(torch.uint8).numpy().data)
