"""The mutations: each breaks one promise of the core in one place, as a slip of the hand would."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one source file. edits: (text that stands there exactly once, what takes its place)."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]

    def apply(self, source: str) -> str:
        """The mutated source. Raises ValueError where a text does not stand there exactly once."""
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"mutation {self.name!r}: {source.count(old)} times in {self.file}: {old!r}")
            source = source.replace(old, new)
        return source


def _one(name: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(name, f"radixkv/{file}", ((old, new),))


PIN = "if isinstance(plan, COPIES){}:\n{}    self.arena(plan.staging).{}pin"
HELD, LET_GO = 12 * " ", 8 * " "  # how deep the two stand
ENTER = "        residency.enter(record, HOST)\n"
NO_LOADS, NO_STAGING = " and not isinstance(plan, LoadPlan)", " and not plan.staging"

MUTATIONS = (
    _one(
        "a page is reused under a copy",
        "pool.py",
        "pages = pages[self.busy[pages] == 0]",
        "pass",
    ),
    _one(
        "a commit leaves its old pin",
        "tree.py",
        "            node.pin(to)\n            self.unpin(hint, depth)\n",
        "            node.pin(to)\n",
    ),
    _one(
        "the stamp goes to the lower half of a split",
        "acquire.py",
        "found.path.append(tree.split(last, found.within))",
        "tree.split(last, found.within)\n            found.path.append(last)",
    ),
    _one(
        "a hole is counted",
        "coverage.py",
        "                break\n            parts.append",
        "                if record.index != index or record.end > found.pages:\n"
        "                    break\n"
        "                page, index = record.end, index + 1\n"
        "                continue\n"
        "            parts.append",
    ),
    _one(
        "a damaged chunk is delivered",
        "loads.py",
        "        ok = done.outcome is Outcome.OK\n",
        "        ok = done.outcome is not Outcome.ERROR\n",
    ),
    _one(
        "a failed load counts as done",
        "loads.py",
        "        if done.outcome is Outcome.OK:\n",
        "        if True:\n",
    ),
    _one(
        "movers ignore the fence of a commit",
        "stores.py",
        "if core.pool.n_busy and core.pool.unready[pages].any():",
        "if False:",
    ),
    Mutation(
        "a host slot is not pinned while it is loaded from",
        "radixkv/core.py",
        (
            (PIN.format("", HELD, ""), PIN.format(NO_LOADS, HELD, "")),
            (PIN.format("", LET_GO, "un"), PIN.format(NO_LOADS, LET_GO, "un")),
        ),
    ),
    _one(
        "a child is readable before its parent",
        "residency.py",
        "[r for r in landed if r.parent is None or r.parent.tiers[tier].state is State.READY]",
        "list(landed)",
    ),
    _one(
        "copy-on-write looks at the ref count",
        "lease.py",
        "pool.fills[self._table.item(entry)] > offset",
        "pool.refs[self._table.item(entry)] > 1",
    ),
    Mutation(
        "room for a child is made by evicting its parent",
        "radixkv/writes.py",
        (
            ("        residency.claim_parent(record, tier)\n        record", "        record"),
            ("            else:\n                residency.claim_parent(record, tier, -1)\n", ""),
            (
                "                residency.enter(record, tier)\n",
                "                residency.claim_parent(record, tier)\n                residency.enter(record, tier)\n",
            ),
        ),
    ),
    _one(
        "a split leaves pins below the cut",
        "tree.py",
        "n = bisect_right(node.pins, at)",
        "n = 0",
    ),
    _one("a tail is taken without a ref", "acquire.py", "        plane.pool.retain_one(partial.page)\n", ""),
    _one(
        "a load starts at the chunk's first page",
        "coverage.py",
        "parts.append(_part(record, page - index * tree.chunk_pages, record.end - page, record.end * size))",
        "parts.append(_part(record, 0, record.end - page, record.end * size))",
    ),
    _one(
        "a chunk's key leaves its parent out",
        "paths.py",
        "        if record.parent is None:\n            return self.root_of",
        "        if record.parent is None or record.parent.parent is None:\n            return self.root_of",
    ),
    _one(
        "a late copy lands in a record copied anew",
        "residency.py",
        "        if residence.plan != plan:\n",
        "        if not residence.plan:\n",
    ),
    Mutation(
        "a staging buffer is free under its copies",
        "radixkv/core.py",
        (
            (PIN.format("", HELD, ""), PIN.format(NO_STAGING, HELD, "")),
            (PIN.format("", LET_GO, "un"), PIN.format(NO_STAGING, LET_GO, "un")),
        ),
    ),
    _one("a host slot is free under its copies", "slots.py", "        if slot in self.pins:\n", "        if False:\n"),
    _one(
        "a passed fence offers no victims",
        "core.py",
        "        if passed:\n",
        "        if passed and not self.fences:\n",
    ),
    _one(
        "a cut goes past another lease's pin",
        "cut.py",
        "low = max(-(-keep // size) - node.start, 0, node.pins[-1] - node.start if node.pins else 0)",
        "low = max(-(-keep // size) - node.start, 0)",
    ),
    _one(
        "media are left out of a chunk's key",
        "writes.py",
        "chunk_key(parent, *core.media.stored(data))",
        "chunk_key(parent, core.media.stored(data)[0])",
    ),
    _one(
        "a failed read is never final",
        "loads.py",
        "if not ok and final and record",
        "if not ok and not final and record",
    ),
    _one(
        "a partial hit inside a page is pinned one page short",
        "acquire.py",
        "end, depth = partial, depth + 1",
        "end, depth = partial, depth",
    ),
    _one("a hint stops one node short", "node.py", "while node.start >= depth and", "while node.start > depth and"),
    _one(
        "a truncate lowers a fill that others rely on",
        "lease.py",
        "if pool.refs[page] == 1 and not pool.marks[page]:  # nobody",
        "if True:  # nobody",
    ),
    _one(
        "the upper part of a long edge is cut",
        "evict.py",
        "        tree.split(node, resident",
        "        node = tree.split(node, resident",
    ),
    Mutation(
        "the hottest page goes first",
        "radixkv/policy.py",
        (("import index\n", "import neg\n"), ("staticmethod(index)", "staticmethod(neg)")),
    ),
    _one(
        "a flush forgets conversation ends",
        "flush.py",
        "if not any(map(_safe, tree.saying(node, node.end, edge))):",
        "if False:",
    ),
    _one(
        "a new revision keeps its root's key",
        "clear.py",
        "        tree.generations[namespace.digest] = generation\n",
        "        pass\n",
    ),
    _one(
        "a load that fails for good leaves its pages in the tree",
        "loads.py",
        "        withdraw(core.tree, record, plan.first_page, flight.pages, self.leases())\n",
        "",
    ),
    _one(
        "loaded pages may be read before the load ends",
        "core.py",
        "self.pool.hold(flight.pages, write=load, load=load)",
        "self.pool.hold(flight.pages, write=load)",
    ),
    _one(
        "cached tokens that are not loaded count as there",
        "acquire.py",
        "device, covered = base, parts[-1].covered",
        "device, covered = base, (parts + left)[-1].covered",
    ),
    _one("a withdrawal spares the leases on its pages", "cut.py", "        lease.spoil(bad)\n", "        pass\n"),
    _one(
        "a withdrawal leaves the pins of leases with pages of their own",
        "cut.py",
        "moved = [lease for lease in leases if lease.retreat(*place)]",
        "moved = []",
    ),
    _one(
        "a key written again is still being deleted",
        "residency.py",
        "        self.deleting.pop(key, None)\n        self.condemned",
        "        self.condemned",
    ),
    _one(
        "victims in line go before colder ones in the heap",
        "policy.py",
        "if not heap or (line and line[0] < heap[0]):",
        "if not heap or line:",
    ),
    _one(
        "a partly common page is kept beside loads",
        "acquire.py",
        "            found.partial, found.partial_tokens = None, 0\n",
        "            pass\n",
    ),
)
