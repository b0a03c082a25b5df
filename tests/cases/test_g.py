"""Class G, abuse of the Python API: tokens that are no tokens never reach the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.cache import Cache
from radixkv.errors import InvalidTokens
from tests.cases.conftest import Drive
from tests.harness.driver import NS, prompt

BAD: list[tuple[Any, str]] = [
    ([-1], "0"),
    ([3, 2**31], "1"),
    ([2**32 + 5], "0"),
    ([1, 2, 2**63], "2"),
    ([True], "0"),
    (["7"], "0"),
    ([3.0], "0"),
    ([3.5], "0"),
    ([None], "0"),
    ([3, np.timedelta64(5)], "1"),
    ([np.timedelta64(5, "ns")], "0"),
    (np.array([5, -1]), "1"),
    (np.array([2**32 + 5]), "0"),
    (np.array([2**63], np.uint64), "0"),
    (np.array([3.0]), "0"),
    (np.array([True]), "0"),
    (np.array([[1, 2]]), "dimension"),
    (None, "NoneType"),
    ("77", "str"),
    (b"77", "bytes"),
    (7, "int"),
    (np.ma.MaskedArray(np.array([1, -5, 3], np.int32), mask=[False, True, False]), "masked"),
    (torch.zeros(2, dtype=torch.bfloat16), "BFloat16"),
    (torch.zeros(2, dtype=torch.bool), "0"),
]
VERBS: dict[str, Callable[[Cache, Any], Any]] = {
    "lookup": lambda cache, tokens: cache.lookup(NS, tokens),
    "acquire": lambda cache, tokens: cache.acquire(NS, tokens),
    "promote": lambda cache, tokens: cache.promote(NS, tokens),
    "demote": lambda cache, tokens: cache.demote(NS, tokens, to="host"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("tokens", "named"), BAD, ids=[repr(tokens) for tokens, _ in BAD])
def test_g1_bad_tokens(drive: Drive, verb: str, tokens: Any, named: str) -> None:
    d = drive()
    d.run([5, 3, 7])
    before = d.stats
    with pytest.raises(InvalidTokens, match=named):
        VERBS[verb](d.cache, tokens)
    assert d.stats == before, "the cache is unchanged"
    d.check()


@pytest.mark.parametrize(("tokens", "named"), BAD, ids=[repr(tokens) for tokens, _ in BAD])
def test_g1_bad_tokens_in_a_commit(drive: Drive, tokens: Any, named: str) -> None:
    d = drive()
    session = d.lease(prompt(20))
    session.tokens += [1, 2, 3]
    session.compute()
    with pytest.raises(InvalidTokens, match=named):
        session.lease.commit(tokens)
    assert session.lease.committed == 20
    session.commit()
    d.check()
    session.close()
    assert d.look([*prompt(20), 1, 2, 3, 4])[0] == 23


def test_g1_a_commit_that_contradicts_the_prompt(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(40), commit=False)
    with pytest.raises(InvalidTokens, match="17"):
        session.lease.commit([*prompt(17), 999])
    assert session.lease.committed == 0
    session.commit()
    d.check()


def test_g1_more_than_was_appended(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(20))
    with pytest.raises(ValueError, match="20"):
        session.lease.commit([1])
    assert session.lease.committed == 20
    with pytest.raises(ValueError):
        session.lease.append(-1)
    d.check()


def test_g1_a_million_tokens_are_legal(drive: Drive) -> None:
    d = drive()
    million = np.arange(1_000_000, dtype=np.int64)
    assert d.look(million.tolist()[:1000]) == (0, 0, 0)
    assert d.cache.lookup(NS, million).covered_tokens == 0
    with pytest.raises(InvalidTokens, match="limit"):
        d.cache.lookup(NS, np.zeros((1 << 24) + 1, np.int32))


def test_g1_kinds_of_integer_arrays(drive: Drive) -> None:
    d = drive()
    d.run(prompt(40))
    for small in ("int8", "uint8"):
        assert d.cache.lookup(NS, np.array([1, 8, 15], small)).device_tokens == 3
    for large in ("int32", "int64", "uint32", "uint64"):
        assert d.cache.lookup(NS, np.array(prompt(40), large)).device_tokens == 40
        assert d.cache.lookup(NS, np.array(prompt(80), large)[::2]).device_tokens == 1
    assert d.cache.lookup(NS, tuple(prompt(40))).device_tokens == 40
    for other in (">i4", "<i8", ">u4", ">u8"):
        assert d.cache.lookup(NS, np.array(prompt(40), other)).device_tokens == 40
    strided = np.array(prompt(40), np.int32).repeat(3)[::3]
    backwards = np.array(prompt(40)[::-1], np.int32)[::-1]
    closed = np.array(prompt(40), np.int32)
    closed.flags.writeable = False
    for array in (strided, backwards, closed):
        assert d.cache.lookup(NS, array).device_tokens == 40
        with d.cache.acquire(NS, array) as lease:
            assert lease.cached_tokens == 39
    assert d.cache.lookup(NS, torch.tensor(prompt(40))).device_tokens == 40
