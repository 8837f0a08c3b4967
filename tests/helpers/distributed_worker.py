"""One rank of tests/helpers/distributed.py: a process that is sent functions, calls them and sends back the
results."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import itertools
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

CALLS = itertools.count(1)
CALLS_BETWEEN_DESTRUCTIONS = 20  # it takes half a second


def serve(connection: Connection, log: Any, environment: dict[str, str], cwd: Path) -> None:
    """Join the process group, then serve calls until the other end goes away.

    Args:
        connection: to the test process.
        log: the file descriptor, to be detached, of the file that takes all output.
        environment: variables to set: the launcher's.
        cwd: the folder to work in.
    """
    os.setsid()  # so that the test process also ends what a test function started
    output = log.detach()
    sys.stdout.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a hung rank where it is
    threading.Thread(target=leave_with_parent, args=[os.getppid()], daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    default_group = dist.group.WORLD
    connection.send((True, None))
    while True:
        try:
            module_name, path, qualname, arguments = connection.recv()
        except EOFError:
            # The tests are over. Leave at once: an orderly end waits for the other ranks.
            os._exit(0)
        try:
            module = load_module(module_name, path)
            if qualname is None:  # this call only loads the module
                result = pickle.dumps((True, None))
            else:
                reset()
                args, kwargs = pickle.loads(arguments)
                result = pickle.dumps((True, getattr(module, qualname)(*args, **kwargs)))
                del args, kwargs
                clean_up(default_group)
        except BaseException:
            result = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(result)


def leave_with_parent(parent: int) -> None:
    """End this process when the tests were killed while a call is running or hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def load_module(name: str, path: str) -> ModuleType:
    """Return the module that the test process calls *name*, by that name, so that its classes unpickle."""
    if name not in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    module = sys.modules.get(name)
    if module is not None and Path(getattr(module, "__file__", None) or "").resolve() == Path(path):
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def reset() -> None:
    """Give every call the same start, whatever ran before it in this process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports the compiler, which takes a second
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def clean_up(default_group: Any) -> None:
    """Take back what a call left behind: engines, process groups, the libraries' memory of groups."""
    gc.collect()  # an engine holds itself in a circle through its hooks
    if next(CALLS) % CALLS_BETWEEN_DESTRUCTIONS == 0:
        destroy_engines()
    gc.freeze()  # the libraries' objects are many, and both we and DeepSpeed collect often
    world = dist.distributed_c10d._world
    if dist.group.WORLD is not default_group:
        raise RuntimeError("the test function replaced the default process group, which other tests use")
    # Every group has threads and sockets; hundreds of them would use up the file descriptors.
    for group in [group for group in world.pg_map if group is not default_group]:
        dist.destroy_process_group(group)
    reset_libraries()


def destroy_engines() -> None:
    """Take DeepSpeed's hooks off the parameters of engines that are still there: autograd holds these, where
    the garbage collector does not see it, and with them weights and groups, each with a thread that never
    sleeps long."""
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return
    gc.unfreeze()  # what clean_up froze is in no list of the collector's
    # Not isinstance, which asks the object itself, and a proxy whose object is gone then raises.
    for engine in [thing for thing in gc.get_objects() if issubclass(type(thing), module.DeepSpeedEngine)]:
        engine.destroy()
    gc.collect()


def reset_libraries() -> None:
    """Put the modules that remember process groups in global variables back into their first state."""
    # An engine leaves its mpu in deepspeed.utils.groups, and the next engine would take it over.
    module = sys.modules.get("deepspeed.utils.groups")
    if module is not None:
        restore_globals(module)


def restore_globals(module: ModuleType) -> None:
    """Give a module's plain variables the values they have right after import; functions and classes stay."""
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    pristine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pristine)
    for name, value in vars(pristine).items():
        plain = value is None or isinstance(value, bool | int | float | str | list | dict | set | tuple)
        if plain and not name.startswith("__"):
            setattr(module, name, value)
