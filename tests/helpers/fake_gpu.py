"""CUDA tensors without a GPU: torch's fake tensors, which have a shape, a dtype and a device, but no memory.

    def shape_of_product():
        with fake_gpu():
            return (torch.ones(2, 3, device="cuda") @ torch.ones(3, 4, device="cuda")).shape

    def test_shape():
        assert run_with_fake_gpu(shape_of_product) == (2, 4)

An operator on tensors of two devices raises an error, as on a GPU, and so does one that reads a value. In a
backward pass torch's CPU build asks a CUDA driver for devices and streams: fake_gpu.cpp answers, which is
compiled when it is first needed. It must be loaded before torch, so such functions run in a separate process.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.attention.bias
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.varlen import varlen_attn

from model import documents
from model.errors import UserError

SOURCE = Path(__file__).with_suffix(".cpp")
GPU = torch.device("cuda", 0)
HOPPER = (9, 0)
"""Compute capability of an H100."""


def run_with_fake_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call *function*, which must be defined at the top level of its module, in the process that has the
    driver."""
    return _process().submit(function, *arguments).result(timeout=300)


@contextmanager
def fake_gpu(capability: tuple[int, int] = HOPPER, *, read_values: bool = False) -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake, and a GPU of this compute capability is there.

    Args:
        read_values: whether a tensor's value may be read; it is a symbol, not a number.
    """
    shapes = ShapeEnv() if read_values else None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "12.8"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability))
        # As the model finds it in a torch that is built for CUDA.
        stack.enter_context(mock.patch.object(documents, "HAS_VARLEN", True))
        stack.enter_context(mock.patch.object(documents, "varlen_attn", varlen_attn, create=True))
        # Fake tensors have no memory; an address tells storages apart.
        stack.enter_context(
            mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
        )
        # A subclass of tensors, which a fake one cannot become. Flash attention takes it without a mask.
        stack.enter_context(mock.patch.object(torch.nn.attention.bias, "causal_lower_right", _lower_right))
        yield stack.enter_context(mode)


def _lower_right(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=GPU).tril(columns - rows)


@functools.cache
def build_driver() -> Path:
    """Compile fake_gpu.cpp, in two seconds of CPU. Raises UserError without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UserError("no C++ compiler is installed; install g++ or clang++")
    folder = Path(tempfile.mkdtemp(prefix="fake_gpu_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library, include = (Path(torch.__file__).parent / name for name in ("lib", "include"))
    command = [
        compiler,
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{include}",
        str(SOURCE),
        "-o",
        str(folder / "it.so"),
    ]
    command += [f"-L{library}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"]
    subprocess.run(command, check=True)
    return folder / "it.so"


def driver_environment() -> dict[str, str]:
    """Variables with which a new process has the driver; none where torch has its own."""
    return {} if torch.version.cuda is not None else {"LD_PRELOAD": str(build_driver())}


@functools.cache
def _process() -> ProcessPoolExecutor:
    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("torch's CUDA build without a driver has no fake CUDA tensors")
    try:
        preload = driver_environment()
    except UserError as error:
        pytest.skip(str(error))
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
    atexit.register(pool.shutdown, cancel_futures=True)
    with mock.patch.dict(os.environ, preload | one_thread):
        pool.submit(os.getpid).result(timeout=120)
    return pool


def _begin() -> None:
    os.environ.pop("LD_PRELOAD", None)  # not for what this process starts
