"""Whether LMDB may be let near a data file: its pages carry no checksums, and it trusts every number in them.

All tree pages of the current version are read and checked before LMDB maps the file: headers, node offsets, sizes,
flags, counts; that no page is used twice, and none that is free is in use. Layouts are those of LMDB 0.9 on 64 bits
(``MDB_meta``, ``MDB_db``, ``MDB_page``, ``MDB_node`` of its mdb.c). Headers of payload runs are not read here: that
would be one disk access for each; see ``radixkv.tiers.census.delete_record``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.tiers.folder import DATA_FILE

Integers: TypeAlias = npt.NDArray[np.int64]

_META_AT, _META_DBS, _LAST_PAGE, _TXN = 16, 24, 120, 128
_PAGE_HEADER, _NODE_HEADER = 16, 8
_BRANCH, _LEAF = 1, 2
_BIG, _SUB = 1, 2
_DB = np.dtype([
    ("pad", "<u4"), ("flags", "<u2"), ("depth", "<u2"), ("branches", "<u8"), ("leaves", "<u8"), ("overflow", "<u8"),
    ("entries", "<u8"), ("root", "<u8"),
])  # fmt: skip
_NONE = (1 << 64) - 1
_FREE_FLAGS = 8  # integer keys
_ONE_FILE = 0x4000  # how the environment was made: LMDB keeps it here, for a store that was copied
_LEVELS = 32

_KEYS_AT_ONCE = 1 << 15

_GAP_PAGES = 8
"""Pages between two wanted ones that are read along: cheaper than another request."""


class Nodes(NamedTuple):
    """Leaf nodes: page and offset of each one's key, sizes of key and data; run: first page of its data, or -1; sub:
    whether it describes a database.
    """

    page: Integers
    at: Integers
    key_size: Integers
    data_size: Integers
    run: Integers
    sub: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Found:
    """What a walk found. problems: why LMDB must not open the file. databases: the sound leaf nodes, by name. others:
    whether the main database is sound and holds something else than named databases.
    """

    problems: list[str] = field(default_factory=list)
    others: bool = False
    databases: dict[bytes, Nodes] = field(default_factory=dict)


class DataFile:
    """The pages of a data file with two meta pages (``radixkv.tiers.folder.damage``). A context manager.

    Where the file is shorter than they say, pages past its end are as damaged as any other that makes no sense.
    """

    def __init__(self, folder: Path, page_bytes: int) -> None:
        self._fd = os.open(folder / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self.folder = folder
        self.page_bytes = page_bytes
        whole = len(self._map) // page_bytes
        self.pages = np.frombuffer(self._map, np.uint8, whole * page_bytes).reshape(whole, page_bytes)
        meta = max((self.pages[page].tobytes() for page in (0, 1)), key=lambda meta: _number(meta, _META_AT + _TXN))
        self._meta = meta
        self.last = min(_number(meta, _META_AT + _LAST_PAGE), whole - 1)
        self.found = Found()
        self._runs: list[tuple[Integers, Integers]] = [(np.array([0]), np.array([2]))]  # first pages, page counts

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        del self.pages  # a view keeps the map open
        self._map.close()
        os.close(self._fd)

    def check(self) -> Found:
        """Walk the free list, the main database and those it names."""
        self._map.madvise(mmap.MADV_RANDOM)  # what is around a tree page is payload: see ``_will_need``
        free, main = np.frombuffer(self._meta, _DB, 2, _META_AT + _META_DBS)
        spare = self._tree(free, "free list", _FREE_FLAGS)
        names = self._tree(main, "main database", None, _SUB)
        for i in range(len(names.page)):
            if not names.sub[i]:
                self.found.others = True
                continue
            page, at = int(names.page[i]), int(names.at[i])
            name = self.key(names, i)
            start = at + int(names.key_size[i])
            if names.data_size[i] != _DB.itemsize:
                self._bad(f"database {name!r} has no description")
                continue
            inner = np.frombuffer(self.pages[page, start : start + _DB.itemsize].tobytes(), _DB)[0]
            self.found.databases[name] = self._tree(inner, f"database {name.decode(errors='replace')}", 0)
        self._check_free(spare)
        self._check_overlap()
        self._map.madvise(mmap.MADV_NORMAL)
        return self.found

    def key(self, nodes: Nodes, i: int) -> bytes:
        """The key of a node."""
        at = int(nodes.at[i])
        return self.pages[int(nodes.page[i]), at : at + int(nodes.key_size[i])].tobytes()

    def value(self, nodes: Nodes, i: int) -> bytes:
        """The value of a node, from its page or its run."""
        size, run = int(nodes.data_size[i]), int(nodes.run[i])
        if run >= 0:
            flat = self.pages.reshape(-1)
            start = run * self.page_bytes + _PAGE_HEADER
            return flat[start : start + size].tobytes()
        start = int(nodes.at[i]) + int(nodes.key_size[i])
        return self.pages[int(nodes.page[i]), start : start + size].tobytes()

    def _bad(self, problem: str) -> None:
        self.found.problems.append(problem)

    def _tree(self, db: np.void, name: str, flags: int | None, node_flags: int = 0) -> Nodes:
        """The sound leaf nodes of a tree, level by level; a page that is not sound is left out with all below it."""
        root, depth = int(db["root"]), int(db["depth"])
        none = np.zeros(0, np.int64)
        nodes = Nodes(none, none, none, none, none, none.astype(bool))
        if flags is not None and int(db["flags"]) & ~_ONE_FILE != flags:
            self._bad(f"{name}: flags {int(db['flags'])}")
        if root == _NONE:
            if depth or int(db["entries"]):
                self._bad(f"{name}: entries without a root")
            return nodes
        if not 0 < depth <= _LEVELS:
            self._bad(f"{name}: depth {depth}")
            return nodes
        level = np.array([root], np.uint64).astype(np.int64)
        before = len(self.found.problems)
        bounds = np.zeros(1, np.int64), np.zeros(1, np.int64)  # of each page: the key that all in it reach, its size
        for step in range(depth):
            level = level[self._claim(level, np.ones(len(level), np.int64), name)]
            self._will_need(level)
            kind = _LEAF if step == depth - 1 else _BRANCH
            owner, at, size, low, high, bits = self._nodes(level, kind, name)
            starts, where = np.flatnonzero(np.diff(owner, prepend=-1)), owner * self.page_bytes + at
            if len(self.found.problems) == before and len(starts) == len(bounds[0]):  # not if a page is named twice
                if kind == _LEAF:
                    self._check_order(starts, where, size, bounds, name, integers=flags == _FREE_FLAGS)
                bounds = _put(where, starts, bounds[0]), _put(size, starts, bounds[1])  # a page's first has no key
            if kind == _BRANCH:
                level = low | high << 16 | bits << 32
                continue
            nodes = self._leaves(owner, at, size, low | high << 16, bits, name, node_flags)
        if len(nodes.page) != int(db["entries"]):
            self._bad(f"{name}: {len(nodes.page)} of {int(db['entries'])} entries")
        return nodes

    def _will_need(self, level: Integers) -> None:
        """Have the kernel read a level's pages side by side: one after the other, as they are touched, a disk gives a
        fraction of what it can.
        """
        if not len(level):
            return
        pages = np.unique(level)
        ends = np.flatnonzero(np.diff(pages) > _GAP_PAGES)
        firsts, lasts = pages[np.append(0, ends + 1)], pages[np.append(ends, len(pages) - 1)]
        with contextlib.suppress(OSError):  # a hint, on a file system that takes none
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                at, end = first * self.page_bytes, (last + 1) * self.page_bytes
                os.posix_fadvise(self._fd, at, end - at, os.POSIX_FADV_WILLNEED)

    def _claim(self, first: Integers, count: Integers, name: str) -> npt.NDArray[np.bool_]:
        """Which runs of pages lie inside the file; they are in use from now on."""
        good = (first >= 2) & (count > 0) & (first <= self.last) & (first + count - 1 <= self.last)
        if not good.all():
            self._bad(f"{name}: {int((~good).sum())} pages outside the file")
        self._runs.append((first[good], count[good]))
        return good

    def _nodes(self, level: Integers, kind: int, name: str) -> tuple[Integers, ...]:
        """Of all sound pages: page of each node, offset past its header, key size, and its three 16-bit fields."""
        raw = self.pages[level]
        words = raw.view("<u2")
        lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
        good = (raw[:, :8].copy().view("<u8")[:, 0] == level.astype(np.uint64)) & (words[:, 5] == kind)
        good &= (lower >= _PAGE_HEADER) & (lower <= upper) & (upper <= self.page_bytes) & (lower % 2 == 0)
        counts = np.where(good, (lower - _PAGE_HEADER) // 2, 0)
        good &= counts >= (2 if kind == _BRANCH else 1)
        counts[~good] = 0
        row = np.repeat(np.arange(len(level)), counts)
        at = words[row, _PAGE_HEADER // 2 + _ramp(counts)].astype(np.int64)
        fits = (at >= upper[row]) & (at % 2 == 0) & (at + _NODE_HEADER <= self.page_bytes)
        at[~fits] = 0
        low, high, bits, size = (words[row, at // 2 + i].astype(np.int64) for i in range(4))
        fits &= at + _NODE_HEADER + size <= self.page_bytes
        data = np.where(bits == _BIG, 8, low | high << 16) if kind == _LEAF else 0
        self._check_tiling(row, at, _NODE_HEADER + size + data, name)
        good &= np.bincount(row[~fits], minlength=len(level)) == 0
        if not good.all():
            self._bad(f"{name}: {int((~good).sum())} pages make no sense")
        keep = good[row]
        return level[row[keep]], at[keep] + _NODE_HEADER, size[keep], low[keep], high[keep], bits[keep]

    def _check_order(
        self,
        starts: Integers,
        where: Integers,
        size: Integers,
        bounds: tuple[Integers, Integers],
        name: str,
        *,
        integers: bool,
    ) -> None:
        """Keys of all leaves rise, and between two leaves is the key by which LMDB chooses: what it cannot find it can
        neither delete nor replace, and what it writes then may be lost.
        """
        known = bounds[1] > 0
        firsts = starts[known]
        where, size = np.insert(where, firsts, bounds[0][known]), np.insert(size, firsts, bounds[1][known])
        strict = np.insert(np.ones(len(where) - len(firsts), bool), firsts, False)
        wrong = 0
        for first in range(0, len(where) - 1, _KEYS_AT_ONCE):
            some = slice(first, first + _KEYS_AT_ONCE + 1)
            keys = self._keys(where[some], size[some], integers)
            risen = (keys[1:] > keys[:-1]) | (~strict[some][:-1] & (keys[1:] == keys[:-1]))
            wrong += int((~risen).sum())
        if wrong:
            self._bad(f"{name}: {wrong} keys out of order")

    def _keys(self, where: Integers, size: Integers, integers: bool) -> npt.NDArray[np.bytes_]:
        """Keys as strings that compare as LMDB compares them. integers: 8 bytes, little endian."""
        width = max(1, int(size.max()))
        step = np.arange(width)
        inside = step < size[:, None]
        step = np.where(inside, size[:, None] - 1 - step if integers else step, 0)
        raw = np.where(inside, self.pages.reshape(-1)[where[:, None] + step], np.uint8(0))
        return np.ascontiguousarray(raw).view(f"S{width}")[:, 0]

    def _check_tiling(self, page: Integers, at: Integers, size: Integers, name: str) -> None:
        """Nodes fill each page's end without a gap: to delete one, LMDB moves those below by the size that it says."""
        order = np.lexsort((at, page))
        page, at, end = page[order], at[order], (at + size + size % 2)[order]
        follows = np.full(len(at), self.page_bytes)
        follows[:-1][page[1:] == page[:-1]] = at[1:][page[1:] == page[:-1]]
        if (end != follows).any():
            self._bad(f"{name}: {int((end != follows).sum())} entries of another size than they say")

    def _leaves(
        self, owner: Integers, at: Integers, size: Integers, data: Integers, bits: Integers, name: str, flags: int
    ) -> Nodes:
        """The leaf nodes whose key and data lie where they may."""
        big = bits == _BIG
        inside = at + size + np.where(big, 8, data) <= self.page_bytes
        good = (size > 0) & inside & (big | (bits == 0) | (bits == flags))
        if not good.all():
            self._bad(f"{name}: {int((~good).sum())} entries make no sense")
        owner, at, size, data, big, bits = owner[good], at[good], size[good], data[good], big[good], bits[good]
        run = np.full(len(owner), -1, np.int64)
        where = owner[big] * self.page_bytes + at[big] + size[big]
        flat = self.pages.reshape(-1)
        number = flat[where[:, None] + np.arange(8)].copy().view("<u8")[:, 0] if len(where) else np.zeros(0, np.uint64)
        run[big] = np.minimum(number, np.uint64(1 << 62)).astype(np.int64)
        lengths = -(-(data[big] + _PAGE_HEADER) // self.page_bytes)
        keep = np.ones(len(owner), bool)
        keep[big] = self._claim(run[big], lengths, name)
        if not keep.all():
            owner, at, size, data, run, bits = owner[keep], at[keep], size[keep], data[keep], run[keep], bits[keep]
        return Nodes(owner, at, size, data, run, bits == _SUB)

    def _check_free(self, spare: Nodes) -> None:
        """Lists of free pages: as long as they say, and falling."""
        for i in range(len(spare.page)):
            value = self.value(spare, i)
            ids = np.frombuffer(value[: len(value) // 8 * 8], "<u8")
            if not len(ids) or int(ids[0]) != len(ids) - 1:
                self._bad("free list: a list of another length than it says")
                continue
            if len(ids) > 1 and (ids[1:].max() > self.last or ids[1:].min() < 2):
                self._bad("free list: pages outside the file")
                continue
            listed = ids[1:].astype(np.int64)
            if (np.diff(listed) >= 0).any():
                self._bad("free list: pages out of order")
            self._runs.append((listed, np.ones(len(listed), np.int64)))

    def _check_overlap(self) -> None:
        """No page is used twice, or free and used."""
        first = np.concatenate([first for first, _ in self._runs])
        count = np.concatenate([count for _, count in self._runs])
        order = np.argsort(first)
        first, count = first[order], count[order]
        clash = int((first[1:] < first[:-1] + count[:-1]).sum())
        if clash:
            self._bad(f"{clash} pages are used twice, or free and in use")


def _put(values: Integers, at: Integers, others: Integers) -> Integers:
    """A copy of ``values`` with ``others`` in some places."""
    out = values.copy()
    out[at] = others
    return out


def _ramp(counts: Integers) -> Integers:
    """0 to n - 1 for each n of ``counts``, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
