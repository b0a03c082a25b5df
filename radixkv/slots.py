"""Host slots: an arena of quarter-chunk units, handed out whole (four units) or by the quarter, with pins of copies in
flight.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

QUARTERS = 4


class HostSlots:
    """Allocator of one host arena of ``chunks`` whole-chunk places. A slot is the index of its first unit.

    A record of at most ``quarter_tokens`` tokens takes one unit, so that a short tail does not take a whole place. A
    slot that is freed while copies still use it (``pin``) comes back when the last of them ends.
    """

    def __init__(self, chunks: int, chunk_tokens: int) -> None:
        self.chunks = chunks
        self.quarter_tokens = -(-chunk_tokens // QUARTERS)
        self._whole = list(range((chunks - 1) * QUARTERS, -1, -QUARTERS))
        self._cut: OrderedDict[int, list[int]] = OrderedDict()  # places that are cut up -> their free units
        self.taken: dict[int, int] = {}  # slot -> units, those waiting for their last copy included
        self.pins: Counter[int] = Counter()  # copies that use a slot
        self.dead: set[int] = set()  # freed, still pinned
        self.used_units = 0

    def units(self, tokens: int) -> int:
        """Units a record of ``tokens`` tokens takes."""
        return 1 if tokens <= self.quarter_tokens else QUARTERS

    def take(self, tokens: int) -> int:
        """A free slot for a record of ``tokens`` tokens; -1: there is none."""
        units = self.units(tokens)
        if not self._whole and (units == QUARTERS or not self._cut):
            return -1
        if units == QUARTERS:
            slot = self._whole.pop()
        else:
            if not self._cut:
                place = self._whole.pop()
                self._cut[place] = list(range(place + QUARTERS - 1, place - 1, -1))
            place, free = next(reversed(self._cut.items()))
            slot = free.pop()
            if not free:
                del self._cut[place]
        self.taken[slot] = units
        self.used_units += units
        return slot

    def free(self, slot: int) -> None:
        """The record gives its slot up."""
        if slot in self.pins:
            self.dead.add(slot)
        else:
            self._give(slot)

    def pin(self, slot: int) -> None:
        """A copy uses the slot until ``unpin``."""
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """The copy has ended."""
        self.pins[slot] -= 1
        if self.pins[slot]:
            return
        del self.pins[slot]
        if slot in self.dead:
            self.dead.discard(slot)
            self._give(slot)

    def audit(self) -> bool:
        """Every unit is either taken or free, once."""
        units = [u for slot, n in self.taken.items() for u in range(slot, slot + n)]
        units += [u for place in self._whole for u in range(place, place + QUARTERS)]
        units += [u for free in self._cut.values() for u in free]
        return sorted(units) == list(range(self.chunks * QUARTERS))

    def _give(self, slot: int) -> None:
        units = self.taken.pop(slot)
        self.used_units -= units
        if units == QUARTERS:
            self._whole.append(slot)
            return
        place = slot - slot % QUARTERS
        free = self._cut.setdefault(place, [])
        free.append(slot)
        if len(free) == QUARTERS:
            del self._cut[place]
            self._whole.append(place)
