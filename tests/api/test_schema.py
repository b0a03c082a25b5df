"""Schemathesis over the whole OpenAPI document, with all its checks: no 5xx, no status, header or body that is not
documented; what the schema allows is accepted, what it forbids refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case

from radixkv.api.document import document
from tests.api.running import TOKEN, Running, over
from tests.harness.driver import DISK, Driver, prompt

SCHEMA = schemathesis.openapi.from_dict(document())
SHORT = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
LONG = settings(SHORT, max_examples=300, derandomize=False)


@SCHEMA.auth()
class Operator:
    """Sends the operator's token; the checks send requests without it, and with others, too."""

    def get(self, case: Case[Any], context: Any) -> str:
        return TOKEN

    def set(self, case: Case[Any], data: str, context: Any) -> None:
        case.headers["authorization"] = f"Bearer {data}"


@SCHEMA.hook("map_body")
def whole_numbers_as_integers(context: Any, body: Any) -> Any:
    """JSON Schema takes 3.0 for an integer, the service does not (D-G1): what is sent as one is written as one."""
    if isinstance(body, dict):
        return {key: whole_numbers_as_integers(context, value) for key, value in body.items()}
    if isinstance(body, list):
        return [whole_numbers_as_integers(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    driver = Driver(tmp_path_factory.mktemp("schema"), disk_bytes=DISK, threads=True)
    driver.run_threaded(prompt(200))
    with over(driver.cache, max_jobs=1 << 20) as found:
        yield found
    driver.close()


def call(case: Case[Any], running: Running) -> None:
    case.call_and_validate(base_url=running.url)


@SCHEMA.parametrize()
@SHORT
def test_every_route_does_what_its_document_says(case: Case[Any], running: Running) -> None:
    call(case, running)


@pytest.mark.slow
@SCHEMA.parametrize()
@LONG
def test_every_route_at_length(case: Case[Any], running: Running) -> None:
    call(case, running)
