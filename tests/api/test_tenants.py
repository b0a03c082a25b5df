"""Tokens that are bound to a tenant's salt see the tenant's namespaces, and nothing that another's would change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixkv.api import ServiceConfig, TenantToken
from radixkv.client import Client, ServiceError
from radixkv.errors import ConfigError
from radixkv.keys import Namespace
from tests.api.running import TOKEN, Running, over
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt

ALICE, BOB = "token-of-alice-0001", "token-of-bob-000002"
TENANTS = (TenantToken(ALICE, "alice"), TenantToken(BOB, "bob"))
HERS = Namespace("model", salt="alice")
HIS = Namespace("model", salt="bob")


class Two:
    """A cache with prompts of both tenants, and a client for each."""

    def __init__(self, driver: Driver, running: Running) -> None:
        self.driver = driver
        self.running = running
        self.alice = Client(running.url, token=ALICE)
        self.bob = Client(running.url, token=BOB)


@pytest.fixture
def two(drive: Drive) -> Iterator[Two]:
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(128), HERS)
    driver.run(prompt(128), HIS)
    driver.run(prompt(96))
    with over(driver.cache, tenants=TENANTS) as running:
        found = Two(driver, running)
        with found.alice, found.bob:
            yield found


def test_d_a8_lookups_are_in_the_tenants_salt(two: Two) -> None:
    """Filled in where it is left out; another's is refused whether it has anything or not, and the same way."""
    assert two.alice.lookup([("model", prompt(129))]).results[0].device_tokens == 128
    assert two.alice.lookup([(HERS, prompt(129))]).results[0].device_tokens == 128
    said = []
    for salt in ("bob", "nobody", b"\xff"):
        with pytest.raises(ServiceError) as refused:
            two.alice.lookup([(HERS, prompt(8)), (Namespace("model", salt=salt), prompt(129))])
        said.append((refused.value.status, refused.value.problem))
    assert said[0][0] == 403
    assert said == [said[0]] * 3
    only_his = prompt(64, 9)
    two.driver.run(only_his, HIS)
    assert two.alice.lookup([("model", only_his)]).results[0].covered_tokens == 0


def test_stats_are_the_tenants_alone(two: Two) -> None:
    before = two.running.http.get("/v1/stats", headers=bearer(ALICE)).content
    two.driver.run(prompt(200, 5), HIS)
    two.driver.run(prompt(200, 5))
    two.driver.cache.evict(2)
    assert two.running.http.get("/v1/stats", headers=bearer(ALICE)).content == before
    stats = two.alice.stats()
    assert stats.cache is None
    assert (stats.usage.queries, stats.usage.queried_tokens, stats.usage.device.count) == (1, 128, 8)


def test_namespaces_are_the_tenants_alone(two: Two) -> None:
    everything = two.running.client.namespaces().namespaces
    assert len(everything) == 3
    (mine,) = two.alice.namespaces().namespaces
    assert mine.model == "model"
    assert mine in everything
    for entry in everything:
        if entry != mine:
            assert_unknown(lambda entry=entry: two.alice.namespace_stats(entry.id))
    assert_unknown(lambda: two.alice.namespace_stats("0" * 32))
    assert two.alice.namespace_stats(mine.id) == mine


def assert_unknown(call: Any) -> None:
    """404, in the same words as for what there is not."""
    with pytest.raises(ServiceError) as refused:
        call()
    assert refused.value.status == 404
    assert refused.value.problem is not None
    assert "bob" not in refused.value.problem.detail


def test_jobs_of_others_are_unknown(two: Two) -> None:
    two.driver.only_disk()
    job = two.bob.prefetch("model", prompt(128))
    assert job.wanted_tokens == 128
    answers = []
    for job_id in (job.id, "x" * len(job.id)):
        for method in ("GET", "DELETE"):
            response = two.running.http.request(method, f"/v1/prefetch/{job_id}", headers=bearer(ALICE))
            answers.append((response.status_code, response.content))
    assert answers == [answers[0]] * 4
    assert answers[0][0] == 404
    assert two.bob.job(job.id).state == "pending"
    assert two.running.client.job(job.id).state == "pending", "the operator sees all"
    two.driver.drain()
    assert two.bob.job(job.id).state == "done"


def test_a_full_device_tells_a_tenant_nothing(two: Two) -> None:
    with pytest.raises(ServiceError) as refused:
        two.alice.prefetch("model", prompt(128), to="device")
    assert (refused.value.status, refused.value.kind) == (403, "shared-device")
    assert two.alice.prefetch("model", prompt(128)).state == "done"


def test_a_clear_says_nothing_of_deletes_of_others(two: Two) -> None:
    """The disk is still at another's: the tenant's own clear is complete."""
    two.driver.only_disk()
    his = two.driver.cache.clear(HIS, "disk")
    assert two.driver.cache.undeleted(his.disk_keys).deleting == 2
    assert two.driver.cache.undeleted(()).deleting == 0
    answer = two.alice.clear("host")
    assert answer.complete
    two.driver.drain()


def test_the_limit_of_jobs_is_each_callers_own(drive: Drive) -> None:
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(256))
    driver.run(prompt(256), HIS)
    driver.only_disk()
    with over(driver.cache, tenants=TENANTS, max_jobs=2) as running, Client(running.url, token=BOB) as bob:
        for _ in range(2):
            running.client.prefetch(NS, prompt(256))
        with pytest.raises(ServiceError) as refused:
            running.client.call(prepared(NS))
        assert (refused.value.status, refused.value.kind) == (429, "too-many-jobs")
        jobs = [bob.prefetch("model", prompt(256)) for _ in range(2)]
        bob.cancel(jobs[0].id)
        bob.prefetch("model", prompt(256))
        assert_unknown(lambda: bob.job(jobs[0].id))
        driver.drain()


def prepared(namespace: Namespace) -> Any:
    from radixkv.client import _prefetch

    return _prefetch(namespace, prompt(256))


def test_clear_reaches_the_tenants_alone(two: Two) -> None:
    his = next(entry for entry in two.bob.namespaces().namespaces)
    assert_unknown(lambda: two.alice.clear("device", namespace_id=his.id))
    with pytest.raises(ServiceError, match="403"):
        two.alice.clear("device", HIS)
    two.driver.drain()
    answer = two.alice.clear("device")
    assert (answer.device.cleared, answer.device.kept, answer.complete) == (8, 0, True)
    assert two.driver.look(prompt(128), HIS)[0] == 128
    assert two.driver.look(prompt(96))[0] == 96
    assert two.driver.look(prompt(128), HERS)[0] == 0


def test_reads_need_a_token_once_there_are_tenants(two: Two) -> None:
    for path in ("/v1/stats", "/v1/namespaces", "/metrics", "/v1/stats/" + "0" * 32):
        assert two.running.get(path).status_code == 401
    assert two.running.post("/v1/lookup", {"prompts": []}, token=None).status_code == 401
    assert two.running.get("/healthz").status_code == 200
    assert two.running.get("/metrics", token=TOKEN).status_code == 200
    assert two.running.get("/metrics", token=ALICE).status_code == 403, "they are of all tenants"


def test_a_probe_is_refused_before_the_cache_is_asked(two: Two) -> None:
    """How long a refusal takes cannot tell whether the namespace is there: it comes while nobody can ask the cache, as
    a lookup of one's own then does not.
    """
    many = prompt(4000, 7)
    two.driver.run(many[:500], HIS)
    own, answered = httpx.Client(base_url=two.running.url, headers=bearer(ALICE), timeout=30), list[int]()

    def ask() -> None:
        answered.append(own.post("/v1/lookup", json=asked("alice", many)).status_code)

    thread = threading.Thread(target=ask)
    with own:
        with two.driver.cache._plane.lock:
            thread.start()
            for salt in ("bob", "nobody"):
                assert two.running.post("/v1/lookup", asked(salt, many), token=ALICE).status_code == 403
            thread.join(0.5)
            assert not answered
        thread.join()
    assert answered == [200]


def asked(salt: str, tokens: list[int]) -> dict[str, Any]:
    """The body of a lookup of one prompt."""
    return {"prompts": [{"namespace": {"model": "model", "salt": salt}, "tokens": tokens}]}


def test_tokens_are_compared_whole_and_case_matters(two: Two) -> None:
    for token in (ALICE[:-1], ALICE + "x", ALICE.upper(), "", "x" * 5000):
        assert two.running.http.get("/v1/stats", headers=bearer(token)).status_code == 401
    assert two.running.http.get("/v1/stats", headers={"authorization": f"bearer {ALICE}"}).status_code == 200


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}".rstrip()}


def test_what_no_service_may_be_configured_to() -> None:
    with pytest.raises(ConfigError, match="the same"):
        ServiceConfig(token=ALICE, tenants=TENANTS)
    with pytest.raises(ConfigError, match="read_access"):
        ServiceConfig(tenants=TENANTS, read_access="open")
    with pytest.raises(ConfigError, match="16 characters"):
        TenantToken("short", "alice")
    with pytest.raises(ConfigError, match="salt"):
        TenantToken(ALICE, "")
    assert ALICE not in repr(ServiceConfig(tenants=TENANTS)) + repr(TENANTS)


def test_read_access(drive: Drive) -> None:
    driver = drive()
    with over(driver.cache, read_access="token") as running:
        refused = running.get("/v1/stats")
        assert refused.status_code == 401 and refused.json()["detail"] == "a bearer token is needed"
        refused = running.get("/v1/stats", token="wrong")
        assert refused.status_code == 401 and refused.json()["detail"] == "the service knows no such bearer token"
        assert running.get("/v1/stats", token=TOKEN).status_code == 200
    with over(driver.cache) as running:
        assert running.get("/v1/stats").status_code == 200
        assert running.get("/v1/stats", token="wrong").status_code == 401, "a token that is wrong is not ignored"
    assert ServiceConfig(host="0.0.0.0", token=TOKEN).reads_need_token
    assert not ServiceConfig(host="127.0.0.5", token=TOKEN).reads_need_token


def test_a_restarted_store_tells_tenants_apart(drive: Drive) -> None:
    """After a restart a namespace is known from the disk's table alone: its key decides whose it is."""
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(128), HERS)
    driver.run(prompt(128), HIS)
    driver.flush()
    driver.restart()
    with over(driver.cache, tenants=TENANTS) as running, Client(running.url, token=ALICE) as alice:
        (mine,) = alice.namespaces().namespaces
        assert (mine.named, mine.usage.disk.count) == (True, 2)
        assert alice.stats().usage.disk.count == 2
        assert isinstance(running.http, httpx.Client)
