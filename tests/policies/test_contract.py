"""Every registered policy keeps the contract; so does one that a user adds in a file of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv import ConfigError
from radixkv.config import PolicyConfig
from radixkv.policy import POLICIES, register
from tests.policies.contract import PolicyContract


class TestLRU(PolicyContract):
    """The floor."""

    name = "lru"

    def test_the_oldest_goes_first(self) -> None:
        policy = POLICIES["lru"]()
        assert sorted([5, 1, 9], key=policy.rank) == [1, 5, 9]


class NewestFirst:
    """As a user would write one."""

    def rank(self, last_use: int) -> int:
        return -last_use


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    assert register("newest-first")(NewestFirst) is NewestFirst
    yield
    del POLICIES["newest-first"]


class TestAPolicyOfOnesOwn(PolicyContract):
    """Registered by its name, and chosen by it."""

    name = "newest-first"
    settled = False


def test_a_name_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.eviction 'fifo' is not one of lru"):
        PolicyConfig(eviction="fifo")
