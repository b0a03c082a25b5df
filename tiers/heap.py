"""Memory that a commit frees is kept for the next one, instead of going back to the system."""

from __future__ import annotations

import ctypes

_MOST = (32 << 20) - (64 << 10)
"""Of a block from which glibc learns: it takes larger ones for exceptions."""


def keep_freed(nbytes: int) -> None:
    """Have glibc's heap hold on to twice ``nbytes`` of freed memory, 64 MiB at most.

    LMDB takes memory for each page of a transaction and frees all of it at the commit. A heap as it is at first gives
    that back at once, and every batch pays for new pages: more than its codec and its copies together. What glibc
    does when somebody frees a block of ``nbytes`` is to take such blocks for usual; its thresholds, where the user has
    set them, stay as they are, and so does any other allocator.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.free(libc.malloc(min(nbytes, _MOST)))
