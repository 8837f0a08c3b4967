"""Writes weights to safetensors files, one tensor in memory at a time.

The library's own ``save_file`` needs every tensor of a file at once. The format is simple: the header's length (8
bytes, little-endian), a JSON header with each tensor's dtype, shape and place, then the bytes.
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
    shards = _split(tensors, dtype, shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    places = {}
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, source, dtype)
        places.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes(tensors, dtype)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _split(
    tensors: Sequence[ExportedTensor], dtype: torch.dtype, shard_bytes: int
) -> list[list[ExportedTensor]]:
    shards: list[list[ExportedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        tensor_bytes = math.prod(tensor.shape) * dtype.itemsize
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor_bytes
    return shards


def _write_file(
    path: Path, tensors: list[ExportedTensor], source: Callable[[str], Tensor], dtype: torch.dtype
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * dtype.itemsize
        entry = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        header[tensor.name] = entry
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors:
            value = tensor.build(*(source(name) for name in tensor.sources)).to(dtype).contiguous()
            if tuple(value.shape) != tensor.shape:
                raise AssertionError(f"{tensor.name}: {tuple(value.shape)} instead of {tensor.shape}")
            if not torch.isfinite(value).all():
                raise UserError(
                    f"weights: {' and '.join(tensor.sources)} are not finite in {str(dtype).removeprefix('torch.')}; "
                    "valid: --dtype float32, or an earlier --step if the run has diverged"
                )
            file.write(value.flatten().view(torch.uint8).numpy().data)
