"""The C library's heap."""

from __future__ import annotations

import ctypes


def return_memory() -> None:
    """Give back what was freed, where the C library can (glibc).

    It keeps freed blocks that lie between used ones, and, once large ones have been freed, large ones too: a worker
    would grow with the longest documents so far (a hundred bytes a token), and weights that are gone would still count.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
