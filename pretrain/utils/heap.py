"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes


def return_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc).

    It keeps freed blocks that lie between used ones and, once large ones have been freed, large ones too. A
    worker would grow with the longest documents so far (a hundred bytes a token), and freed weights would
    still count.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
