"""Writes a rank's file of a checkpoint, hashed and synced, at once or in a thread during training.

Unlike safetensors' save_file it hashes what it writes instead of reading it back, and needs one tensor at a
time in the host's memory, or a part of one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from model.parameters import ParameterSpec
from pretrain.checkpoint.index import HYPERPARAMETERS, MASTERS, Group, Index, Parameter, flat_name
from pretrain.engine.layout import engine_flats, inner_optimizer, shard_shapes, tensor_place
from pretrain.optim.muon import name_moments
from pretrain.utils.files import CHUNK_BYTES

DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8"}


def engine_tensors(engine: Any) -> dict[str, Tensor]:
    """The flat tensors of this rank's optimizer by their names in its file: fp32 weights and moments. Nothing
    is copied."""
    states = inner_optimizer(engine).state
    tensors = {}
    for number, flat in enumerate(engine_flats(engine)):
        tensors[flat_name(MASTERS, number)] = flat.master.data
        for key in name_moments(flat.group):
            moment = states.get(flat.master, {}).get(key)
            # There is none before the first update.
            tensors[flat_name(key, number)] = torch.zeros_like(flat.master.data) if moment is None else moment
    return tensors


def engine_index(engine: Any, specs: Mapping[str, ParameterSpec]) -> Index:
    """The index of what all ranks write of an engine.

    Args:
        specs: the parameters of its model.
    """
    t, _ = tensor_place(engine)
    shapes, states = shard_shapes(engine), inner_optimizer(engine).state
    groups, parameters, ranks = {}, {}, t
    for number, flat in enumerate(engine_flats(engine)):
        settings = {key: flat.group[key] for key in HYPERPARAMETERS}
        kind, moments = flat.group.get("kind", "adamw"), list(name_moments(flat.group))
        groups[flat.group["name"]] = Group(**settings, moments=moments, kind=kind)
        step, ranks = int(states.get(flat.master, {}).get("step", 0)), flat.ranks * t
        for name, pieces in flat.all_pieces.items():
            split = specs[name].shard_dimension if t > 1 else None
            # All tensor-parallel ranks cut their shards, which have equal shapes, in the same way.
            shards = [
                [(piece.rank * t + shard, number, piece.offset, piece.numel) for piece in pieces]
                for shard in range(1 if split is None else t)
            ]
            shape = list(specs[name].shape)
            parameters[name] = Parameter(flat.group["name"], step, shape, list(shapes[name]), split, shards)
    return Index(ranks, t, groups, {name: parameters[name] for name in specs})


class TensorFile:
    """A safetensors file that is written tensor by tensor, and hashed as it is written.

    Args:
        tensors: what it will hold, by name; of these only shape and dtype are used.
        stopped: asked before every chunk whether to write no more.

    Raises:
        OSError: from every method.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        # Each begins at a multiple of the size of its numbers, as safetensors and torch need it.
        self.order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        self._stopped, self._bytes, self._hash = stopped, 0, xxhash.xxh3_128()
        header, end = {}, 0
        for name in self.order:
            begin, end = end, end + tensors[name].nbytes
            dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._add(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, or the next part of it."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._add(flat.view(torch.uint8).numpy().data)

    def _add(self, data: memoryview) -> None:
        for begin in range(0, len(data), CHUNK_BYTES):
            if self._stopped():
                return
            chunk = data[begin : begin + CHUNK_BYTES]
            self._file.write(chunk)
            self._hash.update(chunk)
            self._bytes += len(chunk)

    def finish(self) -> dict[str, Any]:
        """Sync to disk. Returns the manifest's entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "xxh3_128": self._hash.hexdigest()}

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()


class RankWriter:
    """Writes one rank's file.

    Args:
        background: only copy the tensors to the host's memory here, and write them in a thread while the
            training continues. Needs as much memory as the file takes.

    Attributes:
        written: the manifest's entry by the file's name, once it is written.
        problem: why it could not be written. No error is raised: the other ranks are in a collective.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], background: bool) -> None:
        self.path = path
        self.written: dict[str, dict[str, Any]] = {}
        self.problem: str | None = None
        self._tensors = dict(tensors)
        self._given_up = False
        self._thread: threading.Thread | None = None
        if background:
            self._tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self._thread = threading.Thread(target=self._write, name="checkpoint writer")
            self._thread.start()
        else:
            self._write()

    @property
    def running(self) -> bool:
        """Whether the file is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when everything is written."""
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> None:
        """Write no more; the file stays unfinished."""
        self._given_up = True
        self.wait()

    def _write(self) -> None:
        try:
            file = TensorFile(self.path, self._tensors, lambda: self._given_up)
            try:
                for name in file.order:
                    file.write(self._tensors.pop(name))
                self.written[self.path.name] = file.finish()
            finally:
                file.close()
        except OSError as error:
            self.problem = f"cannot write {self.path.name}: {error.strerror or error}"
        except Exception as error:  # any error must reach the main thread
            self.problem = f"cannot write {self.path.name}: {type(error).__name__}: {error}"
        finally:
            self._tensors.clear()
