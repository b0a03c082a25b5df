"""Names of requests as namespaces, and calls that are answered before the routes are asked."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from radixkv.api import create_app, requests
from radixkv.api.auth import Caller
from radixkv.api.problems import ProblemError
from radixkv.api.requests import namespace_of
from radixkv.keys import Namespace
from radixkv.rest import NamespaceName
from tests.api.running import CONFIG, TOKEN, assert_problem, body_of, over, running, wait_for
from tests.cases.conftest import Drive
from tests.harness.driver import prompt

NAMES = [
    NamespaceName("m"),
    NamespaceName("m", revision="r"),
    NamespaceName("m", adapter="r"),
    NamespaceName("m", kv_format="r"),
    NamespaceName("m", salt="r"),
    NamespaceName("m", salt_base64="cg=="),
    NamespaceName("mr"),
    NamespaceName("", "m", "r"),
]


def test_a_name_that_is_remembered_is_still_what_it_says() -> None:
    """Every part tells names apart, the first time and later."""
    caller = Caller()
    first = [namespace_of(name, caller, "$") for name in NAMES]
    assert first[4] == Namespace("m", salt=b"r") == first[5]
    assert len({space.digest for space in first}) == len(NAMES) - 1
    assert [namespace_of(name, caller, "$") for name in NAMES] == first
    assert first[0] is namespace_of(NamespaceName("m"), caller, "$")


def test_tenants_remember_nothing_of_each_other() -> None:
    alice, bob = Caller(b"alice"), Caller(b"bob")
    hers, his = (namespace_of(NamespaceName("m"), caller, "$") for caller in (alice, bob))
    assert (hers.salt, his.salt) == (b"alice", b"bob")
    named = NamespaceName("m", salt="alice")
    for _ in range(2):
        assert namespace_of(named, alice, "$").digest == hers.digest
        with pytest.raises(ProblemError, match="another salt"):
            namespace_of(named, bob, "$")
    assert len(alice.named) == 2
    assert len(bob.named) == 1


def test_few_names_are_remembered_and_none_that_is_long() -> None:
    caller = Caller()
    for i in range(3 * requests.NAMED):
        name = NamespaceName(f"m{i}", "x" * (requests.NAMED_TEXT if i % 2 else 1))
        assert namespace_of(name, caller, "$").model == f"m{i}"
        assert len(caller.named) <= requests.NAMED
    assert caller.named
    assert all(sum(map(len, key)) <= requests.NAMED_TEXT for key in caller.named)


@pytest.mark.parametrize("below", ["", "/kv", "/v1"])
def test_calls_are_counted_under_their_own_path_where_the_app_is_mounted(
    drive: Drive, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at once or by the router: one answer, one count."""
    driver = drive()
    driver.run(prompt(40))
    app = create_app(driver.cache, CONFIG)
    outer = FastAPI()
    outer.state.service = app.state.service
    outer.mount(below, app)
    counted: list[tuple[str, int]] = []
    monkeypatch.setattr(app.state.service.metrics, "answered", lambda route, status, _: counted.append((route, status)))
    with running(outer) as found:
        assert found.post(f"{below}/v1/lookup", body_of(prompt(41))).json()["results"][0]["device_tokens"] == 40
        assert_problem(found.post(f"{below}/v1/lookup", b"{"), 400)
        assert_problem(found.get(f"{below}/v1/lookup"), 405)
        assert_problem(found.get(f"{below}/v1/lookup/"), 404)
        assert found.http.head(f"{below}/healthz").status_code == 200
        assert found.get(f"{below}/v1/stats/{'0' * 32}").status_code == 404
        wait_for(lambda: len(counted) >= 6)  # a call is counted once its answer has gone
        assert [status for _, status in counted] == [200, 400, 405, 404, 200, 404]
        assert [route for route, _ in counted[:2]] == ["/v1/lookup"] * 2
        assert [route for route, _ in counted[4:]] == ["/healthz", "/v1/stats/{namespace}"]
        app.state.service.jobs.close()
        app.state.service.fast.close()
        app.state.service.slow.close()


@pytest.mark.parametrize("fault", [KeyError("a defect"), RecursionError()])
def test_a_defect_of_a_call_is_logged_and_says_nothing(
    drive: Drive, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> bytes:
        raise fault

    with over(drive().cache) as found:
        monkeypatch.setattr(found.service.lookups, "soon", fails)
        answer = found.post("/v1/lookup", body_of([1]))
        assert assert_problem(answer, 500).type == "urn:radixkv:problem:defect"
        assert "a defect" not in answer.text
        counted = httpx.get(f"{found.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert 'radixkv:http_requests_total{route="/v1/lookup",status="500"} 1.0' in counted
