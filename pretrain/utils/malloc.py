"""Tells the C library to keep the memory that tensors on a CPU have freed, or to return it to the system."""

from __future__ import annotations

import ctypes
import os

# mallopt's parameters, from glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep what is freed, in one heap for all threads, instead of returning it to the system. Before threads
    start.

    By default glibc maps memory for every large tensor and unmaps it when it is freed, so that in each step
    the system clears most of the memory that it uses, page by page: 5 to 13 % of a step on a CPU
    (docs/performance.md). Peak memory stays the same; it is kept between steps. Results do not change.

    Returns:
        Whether it was done: not without glibc, nor where the environment has settings of glibc's malloc.
    """
    given = [name for name in os.environ if name.startswith("MALLOC_")]
    if given or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, -1), (ARENA_MAX, 1))
    )


def return_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc).

    It keeps freed blocks that lie between used ones and, once large ones have been freed, large ones too. A
    worker would grow with the longest documents so far (a hundred bytes a token), and freed weights would
    still count.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
