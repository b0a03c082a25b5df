"""Damaged stores: flipped bits, exchanged records, files cut short or replaced. No wrong byte, no death."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import lmdb

from radixkv.plan import Outcome
from radixkv.tiers.disk import DiskTier
from tests.chaos.parts import Counts, audit, chunk, finished, open_tier
from tests.tiers.chunks import keys
from tests.tiers.contract import check_gauges, read

LOT = 500
"""Records of one store."""

CAP = 128 << 20
COPIES = 25
"""Data files damaged byte by byte, of one store."""


def filled(folder: Path, first: int, count: int) -> range:
    """A closed store of chunks ``first`` and on."""
    tier = open_tier(folder, CAP)
    written = tier.write([chunk(n) for n in range(first, first + count)])
    assert all(outcome is Outcome.OK for outcome, _ in written)
    tier.close()
    return range(first, first + count)


def flips(seed: int, records: int, folder: Path) -> Counts:
    """Flip one bit of each record, or of its index row."""
    counts: Counts = Counts()
    draw = random.Random(seed)
    for first in range(0, records, LOT):
        store = folder / "flips"
        shutil.rmtree(store, ignore_errors=True)
        numbers = filled(store, first, min(LOT, records - first))
        where = {number: draw.random() < 0.7 for number in numbers}
        env = lmdb.open(str(store), max_dbs=8, map_size=CAP, lib_version=0)
        with env.begin(write=True) as txn:
            for number in numbers:
                _flip(env, txn, chunk(number).row.key, draw, in_record=where[number])
        env.close()
        tier = open_tier(store, CAP)
        check_gauges(tier)
        assert tier.stats().corrupt == sum(not there for there in where.values())
        for number, in_record in where.items():
            ended = read(tier, chunk(number))
            wanted = (Outcome.CORRUPT if in_record else Outcome.MISSING), False
            assert ended[0] is wanted[0], f"chunk {number}, flipped in its {'record' if in_record else 'row'}: {ended}"
        assert tier.delete(keys(chunk(n) for n in numbers)) == sum(where.values())
        again = [chunk(n) for n in numbers]
        assert all(outcome is Outcome.OK for outcome, _ in tier.write(again))
        tier.close()
        tier = open_tier(store, CAP)
        audit(tier, list(numbers))
        tier.close()
        counts["bits flipped in records"] += sum(where.values())
        counts["bits flipped in index rows"] += len(where) - sum(where.values())
    return counts


def _flip(
    env: lmdb.Environment, txn: lmdb.Transaction[bytes], key: bytes, draw: random.Random, *, in_record: bool
) -> None:
    if not in_record:
        index = env.open_db(b"index", txn=txn, create=False)
        row = txn.get(key, db=index)
        assert row is not None
        txn.put(key, flipped(row, draw.randrange(len(row) * 8)), db=index)
        return
    payload = env.open_db(b"payload", txn=txn, create=False)
    first = txn.get(key + bytes(4), db=payload)
    assert first is not None
    nbytes = 128 + int.from_bytes(first[24:32], "little")  # header and stored bytes: the rest is padding
    segment, bit = divmod(draw.randrange(nbytes * 8), len(first) * 8)
    name = key + segment.to_bytes(4, "big")
    data = txn.get(name, db=payload)
    assert data is not None
    txn.put(name, flipped(data, bit), db=payload)


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def swaps(seed: int, pairs: int, folder: Path) -> Counts:
    """Exchange whole records, single segments, and index rows of two chunks: each valid, in the wrong place."""
    counts: Counts = Counts()
    draw = random.Random(seed)
    for first in range(0, 2 * pairs, LOT):
        store = folder / "swaps"
        shutil.rmtree(store, ignore_errors=True)
        numbers = list(filled(store, first, min(LOT, 2 * pairs - first)))
        draw.shuffle(numbers)
        env = lmdb.open(str(store), max_dbs=8, map_size=CAP, lib_version=0)
        kinds = {}
        with env.begin(write=True) as txn:
            for one, two in zip(numbers[::2], numbers[1::2], strict=True):
                kinds[one] = kinds[two] = kind = draw.choice(("record", "segment", "row"))
                db = env.open_db(b"index" if kind == "row" else b"payload", txn=txn, create=False)
                _swap(txn, db, chunk(one).row.key, chunk(two).row.key, kind)
                counts[f"pairs swapped: {kind}"] += 1
        env.close()
        tier = open_tier(store, CAP)
        check_gauges(tier)
        for number, kind in kinds.items():
            outcome, right = read(tier, chunk(number))
            wanted = (Outcome.MISSING,) if kind == "row" else (Outcome.CORRUPT, Outcome.MISSING)
            assert outcome in wanted, f"chunk {number}, {kind} swapped: {outcome}, bytes right {right}"
        tier.close()
    return counts


def _swap(txn: lmdb.Transaction[bytes], db: lmdb._Database, one: bytes, two: bytes, kind: str) -> None:
    names = [(one, two)]
    if kind == "segment":
        names = [(one + bytes(4), two + bytes(4))]
    elif kind == "record":
        names = [(one + n.to_bytes(4, "big"), two + n.to_bytes(4, "big")) for n in range(3)]
    for here, there in names:
        values = txn.pop(here, db=db), txn.pop(there, db=db)
        for name, value in zip((there, here), values, strict=True):
            if value is not None:
                txn.put(name, value, db=db)


def files(seed: int, count: int, folder: Path) -> Counts:
    """Cut the data file, replace it, or flip bits and whole sectors anywhere in it, LMDB's own pages included."""
    counts: Counts = Counts()
    draw = random.Random(seed)
    whole = b""
    for number in range(count):
        store = folder / "files"
        if not number % COPIES:
            shutil.rmtree(store, ignore_errors=True)
            numbers = filled(store, number * 10, 60)
            whole = (store / "data.mdb").read_bytes()
        kind = draw.choice(("cut", "replaced", "flipped", "sector", "tree page"))
        data = _damaged(whole, kind, draw)
        for path in store.iterdir():
            path.unlink()
        (store / "data.mdb").write_bytes(data)
        try:
            served = int(finished(partial(use, store, numbers)))
        except AssertionError as error:
            (folder / "failed.mdb").write_bytes(data)
            raise AssertionError(f"file {number} ({kind}; kept as failed.mdb): {error}") from error
        counts[f"files: {kind}"] += 1
        counts["of them set aside"] += bool(list(store.glob("data.mdb.damaged-*")))
        counts[f"chunks served after: {kind}"] += served
        counts[f"chunks lost by: {kind}"] += len(numbers) - served
    return counts


def _damaged(whole: bytes, kind: str, draw: random.Random) -> bytes:
    data = bytearray(whole)
    match kind:
        case "cut":
            return whole[: draw.randrange(len(whole))]
        case "replaced":
            return draw.choice((b"", b"not a store", draw.randbytes(1 << 20), bytes(1 << 20)))
        case "flipped":
            for _ in range(draw.randint(1, 40)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case "sector":
            at = draw.randrange(len(data) // 512) * 512
            data[at : at + 512] = draw.choice((bytes(512), draw.randbytes(512)))
        case "tree page":
            pages = [at for at in range(0, len(data), 4096) if data[at + 10] in (1, 2, 8)]  # branch, leaf, meta
            pages += [at for at in range(0, len(data), 4096) if data[at + 10] == 4][: len(pages)]  # of payload runs
            for _ in range(draw.randint(1, 3)):
                data[draw.choice(pages) + draw.choice((draw.randrange(64), draw.randrange(4096)))] ^= (
                    1 << draw.randrange(8)
                )
    return bytes(data)


def use(folder: Path, numbers: range) -> int:
    """Open what may be damaged and use all of it: reads, deletes, writes, another open. Nothing may be wrong.

    How many chunks were there at first.
    """
    served: list[int] = []
    for _ in range(2):
        tier = open_tier(folder, CAP)
        check_gauges(tier)
        served.append(_all_right(tier, numbers))
        gone, fresh = list(numbers)[::3], [chunk(n) for n in range(10**6, 10**6 + 40)]
        tier.delete(keys(chunk(n) for n in gone))
        tier.write(fresh, delete=keys(chunk(n) for n in list(numbers)[1::3]))
        for _ in range(3):
            tier.write(fresh[:20], delete=keys(fresh[20:]))
            tier.write(fresh[20:], delete=keys(fresh[:20]))
        _all_right(tier, [*numbers, *range(10**6, 10**6 + 40)])
        check_gauges(tier)
        tier.close()
    return served[0]


def _all_right(tier: DiskTier, numbers: range | list[int]) -> int:
    served = 0
    for number in numbers:
        outcome, right = read(tier, chunk(number))
        assert right or outcome is not Outcome.OK, f"wrong bytes of chunk {number} were served"
        served += right
    return served
