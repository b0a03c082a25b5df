"""Negative tokens: refused wherever they stand, since a match looks only at those that the tree has not got."""

from __future__ import annotations

import numpy as np
import pytest

import radixkv
from radixkv.errors import InvalidTokens
from tests.cases.conftest import Drive
from tests.harness.driver import NS, make_layout, prompt


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


@pytest.mark.parametrize("inside", [0, 1, 30])
@pytest.mark.parametrize("past", [1, 20, 512, 513, 900])
@pytest.mark.parametrize("last", [False, True])
def test_g1_a_negative_token_past_the_prompt_in_a_commit(inside: int, past: int, last: bool) -> None:
    """inside: tokens of the same commit that are the prompt's."""
    asked, total = 40, 40 + past
    tokens = np.array(prompt(total), np.int32)
    bad = tokens.copy()
    at = asked + (past - 1 if last else past // 2)
    bad[at] = -1
    with radixkv.open(
        radixkv.Config(layout=make_layout(), device=radixkv.DeviceConfig(pages=64, kind="none"))
    ) as cache:
        with cache.acquire(NS, tokens[:asked]) as lease:
            lease.append(total)
            lease.commit(tokens[: asked - inside])
            with pytest.raises(InvalidTokens, match=f"token -1 at position {at - asked + inside} "):
                lease.commit(bad[asked - inside :])
            assert lease.committed == asked - inside
            lease.commit(tokens[asked - inside :])
        cache.check()
        assert cache.lookup(NS, tokens).covered_tokens == total
        assert cache.lookup(NS, np.abs(bad)).covered_tokens == at
