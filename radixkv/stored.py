"""What stands under which key in the disk tier, and what is being deleted there.

A stored chunk is a record's, or a *stray*: one that no request of this cache can reach (of another model, layout or
shard; an orphan; one whose delete did not work). Strays take room until they are deleted, and go first.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.core import Core, Flight
from radixkv.plan import DeletePlan, Done, Outcome
from radixkv.types import ChunkKey


class Stored:
    """Keys and bytes of the disk tier. used_bytes: what counts against its cap; raw_bytes: payload of the records,
    before compression.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.used_bytes = 0
        self.raw_bytes = 0
        self.keys: set[bytes] = set()  # of the records with a state on disk: never two of one key, whatever the hash
        self.strays: dict[bytes, int] = {}  # key -> bytes; the last one goes first
        self.foreign: set[bytes] = set()  # strays that another model, layout or shard stored
        self.deleting: dict[bytes, int] = {}  # deletes under way whose key has not been written again
        self.condemned: set[bytes] = set()  # keys of revisions that are over, until their delete has worked

    def put(self, key: bytes, size: int, raw: int) -> None:
        """A record takes ``size`` bytes of the cap; below 0: it gives them back, and ``delete`` removes them."""
        (self.keys.add if raw > 0 else self.keys.discard)(key)
        self.used_bytes += size
        self.raw_bytes += raw

    def replaced(self, key: bytes) -> None:
        """A write of ``key`` has been handed over: what stands under it is not there to be deleted any more."""
        self.deleting.pop(key, None)
        self.condemned.discard(key)  # of the weights in use, then: those of a revision that is over are not written
        self.reclaim(key)

    def reclaim(self, key: bytes) -> bool:
        """A stray is one no more. False: it was none."""
        size = self.strays.pop(key, None)
        self.used_bytes -= size or 0
        return size is not None

    def found(self, strays: dict[bytes, int]) -> None:
        """What a store holds beside records, coldest last."""
        self.strays = strays
        self.used_bytes += sum(strays.values())

    def delete_stray(self) -> bool | None:
        """Delete the coldest stray. None: there is none; False: its delete was refused."""
        return self.delete_strays([next(reversed(self.strays))]) if self.strays else None

    def condemn(self, *keys: ChunkKey) -> None:
        """What was stored under ``keys``, and every stray that may be of the same revision (its key does not say), must
        go from the disk: another process would take it for KV of the weights that are in use.
        """
        self.condemned.update(keys, {*self.strays, *self.deleting} - self.foreign)

    def delete_strays(self, keys: Iterable[bytes]) -> bool:
        """Delete those of ``keys`` that are strays. False: the delete was refused."""
        sizes = {key: self.strays.pop(key) for key in list(keys) if key in self.strays}
        self.used_bytes -= sum(sizes.values())
        return self.delete(sizes) if sizes else True

    def delete(self, sizes: dict[bytes, int]) -> bool:
        """Delete what nobody is served from any more. False: the delete was refused, and the keys are strays."""
        self.deleting.update(sizes)
        flight = Flight(DeletePlan(self.core.plan_id(), tuple(sizes)), self._deleted)
        if self.core.submit(flight):
            return True
        self._deleted(flight, Done(flight.plan.id, Outcome.REFUSED))
        return False

    def _deleted(self, flight: Flight, done: Done) -> None:
        assert isinstance(flight.plan, DeletePlan)
        for key in flight.plan.keys:
            size = self.deleting.pop(key, None)
            if done.outcome is Outcome.OK:
                self.condemned.discard(key)
            elif size is not None:
                self.strays[key] = size
                self.used_bytes += size
