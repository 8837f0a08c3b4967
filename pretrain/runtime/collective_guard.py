"""Runs what all ranks do together after the last save: one that fails must not keep the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from model.errors import quote
from pretrain.runtime.world import World

T = TypeVar("T")
KEY = "head_schedules/left_the_others"
POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0
"""What has failed on one rank may also be about to fail, or to end well, on this one."""


def run_guarded(work: Callable[[], T], world: World) -> T:
    """What *work* returns, which is collective. When it fails or is interrupted on one rank, the others also
    leave it. To be called once in a process.

    A rank that leaves a collective leaves a thread in it: the process must end with ``leave``.

    Raises:
        BaseException: what *work* raised on this rank, or what interrupted it.
        RuntimeError: another rank has failed; it names that rank.
    """
    if world.size == 1:
        return work()
    group_store: Any = dist.distributed_c10d._get_default_store()
    store = group_store.clone()  # that of the group may be waiting for another rank

    def begin_thread() -> None:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # a thread begins with the first one

    result = ThreadPoolExecutor(1, "watched", begin_thread).submit(work)
    try:
        while not result.done():
            wait([result], POLL_SECONDS)
            if store.check([KEY]) and not wait([result], GRACE_SECONDS).done:
                raise RuntimeError(store.get(KEY).decode())
        return result.result()
    except BaseException as error:
        with suppress(Exception):  # the rank that hosts the store may have ended
            store.compare_set(KEY, "", f"rank {world.rank} failed: {quote(error, 200, plain=True)}")
        raise
