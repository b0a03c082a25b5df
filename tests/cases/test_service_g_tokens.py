"""Class G through the REST service: token lists and numbers that are none."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from radixkv import rest
from radixkv.client import ServiceError
from radixkv.errors import InvalidTokens
from tests.api.running import Running, assert_problem, lookup_body
from tests.harness.driver import NS, Driver

BAD_TOKENS = [
    "[-1]",
    "[2147483648]",
    "[4294967301]",
    "[9223372036854775808]",
    "[true]",
    '["7"]',
    "[3.0]",
    "[3.5]",
    "null",
]
BAD_TOKENS += ["[1e2]", "[null]", "[[1]]", "{}", "7", '"7"', '"AAA="', '"////"', '"/////w=="', "[1" + "0" * 5000 + "]"]


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=lambda tokens: str(tokens)[:24])
@pytest.mark.parametrize("path", ["/v1/lookup", "/v1/prefetch"])
def test_g1_bad_tokens_through_rest(service: tuple[Driver, Running], path: str, tokens: str) -> None:
    d, running = service
    d.run([5, 3, 7])
    before = d.stats
    body = (
        lookup_body(tokens)
        if path == "/v1/lookup"
        else b'{"namespace": {"model": "model"}, "tokens": %s}' % tokens.encode()
    )
    found = assert_problem(running.post(path, body), 400, 422)
    assert "tokens" in found.detail or found.status == 400
    assert d.stats == before, "the cache is unchanged"
    assert running.client.lookup([(NS, [5, 3, 7, 1])]).results[0].device_tokens == 3, "and the service still answers"


def test_g1_a_number_that_wraps_is_not_the_token_it_wraps_to(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run([5, 6, 7])
    assert_problem(running.post("/v1/lookup", lookup_body(f"[{2**32 + 5}, 6, 7]")), 422)
    assert running.client.lookup([(NS, [5, 6, 7, 8])]).results[0].covered_tokens == 3


@pytest.mark.parametrize("tokens", [[-1], [2**31], [2**32 + 5], [True], ["7"], [3.0], None])
def test_g1_the_client_refuses_them_too(service: tuple[Driver, Running], tokens: Any) -> None:
    with pytest.raises(InvalidTokens):
        service[1].client.lookup([(NS, tokens)])


def test_g1_too_many_tokens(service: tuple[Driver, Running]) -> None:
    _, running = service
    million = json.dumps([7] * 10**6)
    packed = json.dumps(base64.b64encode(b"\x07\0\0\0" * 10**6).decode())
    for tokens in (million, packed):
        prefetch = b'{"namespace": {"model": "model"}, "tokens": %s}' % tokens.encode()
        for path, body in (("/v1/lookup", lookup_body(tokens)), ("/v1/prefetch", prefetch)):
            found = assert_problem(running.post(path, body), 413)
            assert found.type == "urn:radixkv:problem:too-many-tokens"
            assert str(rest.MAX_PROMPT_TOKENS) in found.detail
    with pytest.raises(ServiceError) as refused:
        running.client.lookup([(NS, [7] * 300_000), (NS, [7] * 300_000)])
    assert (refused.value.status, refused.value.kind) == (413, "too-many-tokens")
    assert running.client.lookup([(NS, [7] * rest.MAX_PROMPT_TOKENS)]).results[0].covered_tokens == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_g2_numbers_that_are_none(service: tuple[Driver, Running], number: str) -> None:
    _, running = service
    assert_problem(running.post("/v1/lookup", lookup_body(f"[{number}]")), 400, 422)
    assert_problem(running.post("/v1/clear", b'{"tier": "all", "older_than_s": %s}' % number.encode()), 400, 422)
