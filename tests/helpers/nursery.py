"""A process that has imported the libraries, which takes several seconds; the workers of
distributed.py and the ranks of launch.py are its forks."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock


def start_nursery() -> Any:
    """Start the process that others are forks of, if it does not run yet; the context that forks them."""
    import torch

    context = multiprocessing.get_context("forkserver")
    preload = ["torch", "torch.distributed", "pytest", "hypothesis", "tests.helpers.distributed_worker"]
    preload += ["torch.utils.benchmark", "torch._dynamo", "matplotlib.backends.backend_agg"]
    # DeepSpeed asks for a GPU when it is imported, and a fork could not use it.
    if not torch.cuda.is_available():
        preload += ["deepspeed", "pretrain.trainer", "megatron.core.tensor_parallel"]
    context.set_forkserver_preload(preload)
    # One thread a rank: more compete for the same cores, and results depend on the number. Read at import.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


class ForkedScript:
    """A Python script in a fork, with what launch.py uses of subprocess.Popen."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: int) -> None:
        arguments = (list(command), dict(environment), cwd, DupFd(log))
        self._process = start_nursery().Process(target=run_script, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode


def run_script(command: list[str], environment: dict[str, str], cwd: Path, log: Any) -> None:
    """Become what ``python -u SCRIPT ARGUMENT…`` would be, without the imports."""
    os.setsid()  # so that what the script started ends with it
    output, nothing = log.detach(), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it is the process's
        stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = list(command)
    sys.orig_argv = [sys.executable, "-u", *command]
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
