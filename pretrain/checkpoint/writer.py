"""Writes a rank's files of a checkpoint, hashed and synced, at once or in a thread during training."""

from __future__ import annotations

import contextlib
import copy as copy_module
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor


class _HashingFile:
    """A file that hashes what passes through and keeps the first error instead of raising it.

    torch.save must not see the error: an exception half-way through would leave the other ranks in a
    collective.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self.bytes = 0
        self._hash = xxhash.xxh3_128()
        try:
            self._file = path.open("wb")
        except OSError as error:
            self.error = error

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        self._hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do: close() syncs."""

    def close(self) -> dict[str, Any]:
        """Sync to disk. Returns the manifest's entry."""
        if self.error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self.error = error
        if self.error is not None and hasattr(self, "_file"):
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._file.close()
        return {"bytes": self.bytes, "xxh3_128": self._hash.hexdigest()}


class RecordingCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, which also syncs and hashes every file, and remembers the first error.

    Args:
        background: ``save`` only copies the tensors to the host's memory; ``start`` then writes them in a
            thread, while the training goes on. Needs as much memory as the rank's files take.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.written: dict[str, dict[str, Any]] = {}
        self.problem: str | None = None
        self._background = background
        self._copied: list[tuple[Any, Path]] = []
        self._thread: threading.Thread | None = None

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write *state_dict* to *path*; a failure ends up in ``problem``, not in an exception."""
        if self._background:
            self._copied.append((copied_to_host(state_dict), Path(path)))
        else:
            self._write(state_dict, Path(path))

    def start(self) -> None:
        """Begin to write what ``save`` has copied."""
        self._thread = threading.Thread(target=self._write_copied, name="checkpoint writer")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether files are still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when everything is written."""
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> None:
        """Write no further file, and return when none is being written; what there is stays unfinished."""
        self._copied.clear()
        self.wait()

    def _write_copied(self) -> None:
        while self._copied:
            state_dict, path = self._copied.pop(0)
            try:
                self._write(state_dict, path)
            except Exception as error:  # any error must reach the main thread
                self.problem = self.problem or f"cannot write {path.name}: {type(error).__name__}: {error}"
            del state_dict  # its memory is free before the next file is written

    def _write(self, state_dict: Any, path: Path) -> None:
        file = _HashingFile(path)
        torch.save(state_dict, file)  # type: ignore[arg-type]
        self.written[path.name] = file.close()
        if file.error is not None and self.problem is None:
            self.problem = f"cannot write {path.name}: {file.error.strerror or file.error}"


def copied_to_host(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples whose tensors are in the host's memory and no longer change.

    A tensor that occurs twice is copied once, and so is written once.
    """
    return _copied(value, {})


def _copied(value: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), type(value))
        if key not in copies or value.numel() == 0:
            copy = value.detach().to("cpu", copy=True)
            copies[key] = (
                torch.nn.Parameter(copy, value.requires_grad)
                if isinstance(value, torch.nn.Parameter)
                else copy
            )
        return copies[key]
    if isinstance(value, dict):
        parts = ((name, _copied(part, copies)) for name, part in value.items())
        return OrderedDict(parts) if isinstance(value, OrderedDict) else dict(parts)
    if isinstance(value, list):
        return [_copied(part, copies) for part in value]
    if type(value) is tuple:
        return tuple(_copied(part, copies) for part in value)
    return copy_module.deepcopy(value)
