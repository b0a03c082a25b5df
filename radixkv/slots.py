"""Host slots: an arena of quarter-chunk units, handed out whole (four units) or by the quarter, with pins of copies in
flight.
"""

from __future__ import annotations

from radixkv.types import HostSlot

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
        self._quarters: list[int] = []  # free units of places that are cut up
        self._cut: dict[int, int] = {}  # place -> free units in it
        self._taken: dict[int, int] = {}  # slot -> units
        self._pins: dict[int, int] = {}
        self._dead: set[int] = set()  # freed, still pinned
        self.used_units = 0

    def units(self, tokens: int) -> int:
        """Units a record of ``tokens`` tokens takes."""
        return 1 if tokens <= self.quarter_tokens else QUARTERS

    def take(self, units: int) -> HostSlot | None:
        """A free slot of 1 or 4 units, or None."""
        if units == QUARTERS:
            if not self._whole:
                return None
            slot = self._whole.pop()
        else:
            if not self._quarters:
                if not self._whole:
                    return None
                place = self._whole.pop()
                self._cut[place] = QUARTERS
                self._quarters += range(place + QUARTERS - 1, place - 1, -1)
            slot = self._quarters.pop()
            self._cut[slot - slot % QUARTERS] -= 1
        self._taken[slot] = units
        self.used_units += units
        return HostSlot(slot)

    def free(self, slot: int) -> None:
        """The record gives its slot up."""
        if slot in self._pins:
            self._dead.add(slot)
        else:
            self._give(slot)

    def pin(self, slot: int) -> None:
        """A copy uses the slot until ``unpin``."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """The copy has ended."""
        left = self._pins[slot] - 1
        if left:
            self._pins[slot] = left
            return
        del self._pins[slot]
        if slot in self._dead:
            self._dead.discard(slot)
            self._give(slot)

    def pinned(self, slot: int) -> bool:
        """Whether a copy uses the slot."""
        return slot in self._pins

    def pins(self) -> dict[int, int]:
        """Copies per slot (for audits)."""
        return dict(self._pins)

    def taken(self) -> set[int]:
        """Slots in use, those waiting for their last copy included (for audits)."""
        return set(self._taken)

    def dead(self) -> set[int]:
        """Slots given up while copies still use them (for audits)."""
        return set(self._dead)

    def audit(self) -> bool:
        """Every unit is either taken or free, once."""
        units = [u for slot, n in self._taken.items() for u in range(slot, slot + n)]
        units += [u for place in self._whole for u in range(place, place + QUARTERS)] + self._quarters
        return sorted(units) == list(range(self.chunks * QUARTERS))

    def _give(self, slot: int) -> None:
        units = self._taken.pop(slot)
        self.used_units -= units
        if units == QUARTERS:
            self._whole.append(slot)
            return
        place = slot - slot % QUARTERS
        self._quarters.append(slot)
        self._cut[place] += 1
        if self._cut[place] == QUARTERS:
            del self._cut[place]
            self._quarters = [q for q in self._quarters if q - q % QUARTERS != place]
            self._whole.append(place)
