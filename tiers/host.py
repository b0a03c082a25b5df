"""Host memory of chunks: one slab, handed out as views by slot."""

from __future__ import annotations

import contextlib
import mmap


class HostArena:
    """``units`` buffers of ``unit_bytes`` bytes in one page-aligned slab; a longer buffer spans the units that follow.

    The slab is taken once, as it is: rounded up to the OS page, never to a power of two. It is private anonymous
    memory, so a forked child cannot write into its parent's; the OS counts what has been written. Zero units are legal.
    Raises ValueError for negative units or a unit without bytes, OSError where the system has no such memory.
    """

    def __init__(self, units: int, unit_bytes: int) -> None:
        if units < 0 or unit_bytes < 1:
            raise ValueError(f"an arena needs units >= 0 and unit_bytes >= 1, not {units} and {unit_bytes}")
        self.units = units
        self.unit_bytes = unit_bytes
        self._slab: mmap.mmap | None = None
        if units:
            size = -(-units * unit_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # First writes run several times faster through huge pages; a kernel built without them refuses.
                with contextlib.suppress(OSError):
                    self._slab.madvise(mmap.MADV_HUGEPAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the slab as the OS counts them; 0 once closed."""
        return 0 if self._slab is None else len(self._slab)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """``nbytes`` writable bytes from the start of unit ``slot`` on. Raises ValueError outside the arena."""
        first = slot * self.unit_bytes
        if not 0 <= slot < self.units or not 0 < nbytes <= self.units * self.unit_bytes - first:
            raise ValueError(
                f"slot {slot} with {nbytes} bytes is outside an arena of {self.units} units of {self.unit_bytes} bytes"
            )
        if self._slab is None:
            raise ValueError(f"slot {slot} of an arena that is closed")
        return memoryview(self._slab)[first : first + nbytes]

    def close(self) -> None:
        """Give the memory back, once the last view of it is gone: a copy that still runs keeps it. Idempotent."""
        self._slab = None
