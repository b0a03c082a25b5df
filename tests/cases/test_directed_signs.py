"""Negative tokens: refused wherever they stand, since a match looks only at those that the tree has not got."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import InvalidTokens
from tests.cases.conftest import Drive
from tests.harness.driver import NS, prompt


@pytest.mark.parametrize("known", [0, 64])
@pytest.mark.parametrize("rest", [1, 20, 512, 513, 900])
@pytest.mark.parametrize("last", [False, True])
def test_g1_a_negative_token_behind_what_is_known(drive: Drive, known: int, rest: int, last: bool) -> None:
    d = drive(host_chunks=0)
    if known:
        d.run(prompt(known))
    tokens = np.array(prompt(known + rest), np.int32)
    good = tokens.copy()
    at = known + (rest - 1 if last else rest // 2)
    tokens[at] = -1
    for ask in (d.cache.lookup, d.cache.acquire):
        with pytest.raises(InvalidTokens, match=f"token -1 at position {at} "):
            ask(NS, tokens)
    d.check()
    assert d.stats.open_leases == 0
    assert d.cache.lookup(NS, good).covered_tokens == known
    d.cache.acquire(NS, good).close()
