"""Connects the ranks: each publishes its device in the store, before a backend is chosen for all of them.

A later check would be too late: a rank whose GPU is broken would wait with gloo for others that use NCCL, and
two ranks on one GPU would fail inside NCCL with its message.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from model.errors import MachineError, UserError, quote
from pretrain.runtime.environment import Launch, read_environment
from pretrain.runtime.hardware import detect_device
from pretrain.utils.format import log_line

T = TypeVar("T")
KEY = "head_schedules/device"
HEARING = timedelta(seconds=5)
MEETING = timedelta(minutes=5)
"""Nodes of a cluster may start one after the other, but not by more than this."""
NOTICE_SECONDS = 10.0
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_meetings = itertools.count()
"""A launcher's store outlives a meeting: the next one must not read what was written for the one before."""


def meet(rank: int, size: int, timeout: timedelta) -> torch.device:
    """Start the process group, gloo on CPUs and NCCL on GPUs, and return this rank's device. Collective.

    With several ranks, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. LOCAL_RANK becomes the
    number of the GPU, which DeepSpeed reads it as: a task that sees one GPU only has number 0, at any place
    on the node.

    Raises:
        UserError: a rank finds no GPU though others do, two ranks would share one, or one sees fewer than it
            needs.
    """
    device, answer = _own_device()
    store: dist.Store = dist.HashStore()  # of a rank that is alone: no port of the machine
    if size > 1:
        store, rank, size = _reach_the_others(rank, size)
        store = dist.PrefixStore(f"{KEY}/{next(_meetings)}", store)
        store.set_timeout(timeout)
        store.set(f"{KEY}/{rank}", json.dumps(answer))
        if rank == 0:
            names = [f"{KEY}/{other}" for other in range(size)]
            answers = [json.loads(text) for text in _wait_interruptibly(lambda: [*map(store.get, names)])]
            store.set(KEY, devices_problem(answers) or "")
        problem = _wait_interruptibly(lambda: store.get(KEY)).decode()
        if problem:
            _wait_until_all_have_read(store, rank, size)
    else:
        problem = answer["problem"]
    if problem:
        raise UserError(problem)
    _choose(device)
    dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def check_group(launch: Launch) -> torch.device:
    """This rank's device, for a process group that the caller of the library has started.

    Raises:
        UserError: its ranks are not those of the environment, or it does not serve the device.
    """
    device, answer = _own_device()
    if answer["problem"]:
        raise UserError(answer["problem"])
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (launch.rank, launch.size):
        raise UserError(
            f"process group: this process is rank {rank} of {size} in it, and rank {launch.rank} of "
            f"{launch.size} in the environment (RANK, WORLD_SIZE); start the ranks with torchrun or "
            "deepspeed, or destroy the group before train"
        )
    if BACKENDS[device.type] not in (backends := str(dist.get_backend_config())):
        raise UserError(
            f"process group: its backend {backends!r} lacks {BACKENDS[device.type]}, which trains on "
            f"{device.type}; start it with that, or destroy it before train"
        )
    _choose(device)
    return device


def _choose(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)


def destroy_group() -> None:
    """Destroy the process group that ``meet`` started. The ranks can then meet again at the same address.

    Each waits for the others first: HEARING at most, since one that has failed alone does not come. Nothing
    may hold the group any more, or rank 0's port stays open.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    others = [f"{KEY}/{other}" for other in range(size)]
    with contextlib.suppress(dist.DistError):
        store.set(f"{KEY}/{rank}/parts", "")
        store.wait([f"{other}/parts" for other in others], HEARING)
    dist.destroy_process_group()
    if size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with contextlib.suppress(dist.DistError):
            if rank:
                store.set(f"{KEY}/{rank}/parted", "")
                _wait_until_closed(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            else:
                store.wait([f"{other}/parted" for other in others[1:]], HEARING)


def _wait_until_closed(address: str, port: int) -> None:
    """Wait until rank 0 has closed its port, or this rank could meet the others there and lose them again.
    HEARING at most."""
    ends = time.monotonic() + HEARING.total_seconds()
    with contextlib.suppress(OSError):
        while time.monotonic() < ends:
            socket.create_connection((address, port), timeout=1).close()
            time.sleep(0.05)


def _reach_the_others(rank: int, size: int) -> tuple[dist.Store, int, int]:
    """The store that rank 0 hosts, as soon as all ranks have reached it."""
    where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
    seconds = f"{MEETING.total_seconds():g} s"
    text = log_line("waiting", f"rank {rank}, for {size} ranks to meet at {where}, {seconds} at most")
    notice = threading.Timer(NOTICE_SECONDS, print, [text], {"file": sys.stderr, "flush": True})
    if os.environ["LOCAL_RANK"] == "0":
        notice.start()
    began = time.monotonic()
    try:
        return _wait_interruptibly(lambda: _start_store(rank, size))
    except (RuntimeError, OSError) as error:
        late = time.monotonic() - began > MEETING.total_seconds() / 2
        # Too late, the machines may be slow, or one of them gone.
        raise (MachineError if late else UserError)(
            f"MASTER_ADDR: the {size} ranks did not meet at {where}{f' within {seconds}' if late else ''} "
            f"({quote(str(error).splitlines()[0], 200, plain=True)}); give an address of rank 0's machine "
            "that all can reach and a port that is free there, and start every rank"
        ) from error
    finally:
        notice.cancel()


def _start_store(rank: int, size: int) -> tuple[dist.Store, int, int]:
    if rank == 0 and (listener := _listen_on_this_machine()):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=True,
            timeout=MEETING,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        return store, rank, size
    return next(dist.rendezvous("env://", rank, size, timeout=MEETING))


def _wait_interruptibly(wait: Callable[[], T]) -> T:
    """What *wait* returns. It runs in a thread: torch's C++ does not look at signals while it waits for other
    ranks, and a request to stop must end this rank."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(wait())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return result.result()


def _listen_on_this_machine() -> socket.socket | None:
    """A socket at MASTER_ADDR, where that is an address of the loopback interface, all ranks are on this
    machine and rank 0 hosts the store; torch's own listens on every interface of the machine.

    An address of the loopback interface alone does not say that: many a system's /etc/hosts has its own name
    for 127.0.1.1, which the other nodes know by its real address.
    """
    launch, told = read_environment(), {"LOCAL_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        or not told
        or launch.size > launch.local_size
    ):
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(place[0]).is_loopback:
        return None
    return socket.create_server(place[:2], family=family)


def devices_problem(answers: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with the devices of all ranks together, in rank order; None if nothing is."""
    first: dict[tuple[str, str], int] = {}
    kinds = {answer["kind"] for answer in answers if not answer["problem"]}
    for rank, answer in enumerate(answers):
        where = f"rank {rank} on {answer['host']}"
        if answer["problem"]:
            return f"{where}: {answer['problem']}" if rank else str(answer["problem"])
        if answer["kind"] == "cpu" and len(kinds) > 1:
            return (
                f"device: {where} finds no GPU, though others do; look at nvidia-smi there and leave the "
                "node out, or run all ranks on CPUs: DS_ACCELERATOR=cpu"
            )
        if answer["kind"] == "cuda":
            other = first.setdefault((answer["host"], answer["device"]), rank)
            if other != rank:
                return (
                    f"device: ranks {other} and {rank} on {answer['host']} have the same GPU; start one "
                    "rank for each GPU of a node, and let each task see its own"
                )
    return None


def _wait_until_all_have_read(store: dist.Store, rank: int, size: int) -> None:
    """Make rank 0, which hosts the store, wait until the others have read the problem."""
    with contextlib.suppress(dist.DistError):  # a rank that has died meanwhile does not read it
        if rank:
            store.set(f"{KEY}/{rank}/heard", "")
        else:
            store.wait([f"{KEY}/{other}/heard" for other in range(1, size)], HEARING)


def _own_device() -> tuple[torch.device, dict[str, str]]:
    """This rank's device, and its description for the other ranks."""
    device, problem = torch.device("cpu"), ""
    try:
        device = detect_device()
    except UserError as error:
        problem = str(error)
    name = ""
    if device.type == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    return device, {"host": socket.gethostname(), "kind": device.type, "device": name, "problem": problem}
