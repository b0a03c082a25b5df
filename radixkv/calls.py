"""The calls of the REST service: one table for its routes, its OpenAPI document and the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from radixkv.rest import (
    ClearRequest,
    ClearResponse,
    Health,
    Job,
    LookupRequest,
    LookupResponse,
    NamespaceEntry,
    NamespacesResponse,
    PrefetchRequest,
    StatsResponse,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call. request: type of its JSON body. response: type of its JSON answer; None: text. status: of success.
    changes: it needs a bearer token. safe: may be sent again after a failure. errors: statuses it may answer, beside
    those of its kind. example, answer: of its two bodies.
    """

    name: str
    method: str
    path: str
    summary: str
    response: type | None
    request: type | None = None
    status: int = HTTPStatus.OK
    changes: bool = False
    open: bool = False
    safe: bool = True
    errors: tuple[int, ...] = ()
    query: dict[str, Any] = field(default_factory=dict)
    example: Any = None
    answer: Any = None

    @property
    def statuses(self) -> tuple[int, ...]:
        """Statuses of its errors, all of them."""
        out = {*self.errors}
        if not self.open:
            out |= {401, 403, 503}
        if self.request is not None:
            out |= {400, 408, 413, 415, 422}
        if self.query:
            out.add(422)
        return tuple(sorted(out))


_JOB = {"id": "Zr7yq0", "state": "done", "to": "host", "wanted_tokens": 4096, "moved_tokens": 4096}
_NAME = {"model": "meta-llama/Llama-3.1-8B", "revision": "0e9e39f", "salt": "tenant-a"}

LOOKUP = Call(
    "lookup",
    "POST",
    "/v1/lookup",
    "What each tier has of prompts; nothing is pinned or counted",
    LookupResponse,
    LookupRequest,
    example={
        "prompts": [
            {"namespace": _NAME, "tokens": [128000, 2675, 527, 264]},
            {"namespace": {"model": "my-model"}, "tokens": "AQAAAAIAAAADAAAA"},
        ]
    },
    answer={
        "results": [
            {"device_tokens": 2, "host_tokens": 4, "disk_tokens": 4, "covered_tokens": 4, "usable_tokens": 3},
            {"device_tokens": 0, "host_tokens": 0, "disk_tokens": 0, "covered_tokens": 0, "usable_tokens": 0},
        ]
    },
)
STATS = Call("stats", "GET", "/v1/stats", "Hits, occupancy, evictions, copies", StatsResponse)
NAMESPACE_STATS = Call(
    "namespace_stats", "GET", "/v1/stats/{namespace}", "The same of one namespace", NamespaceEntry, errors=(404,)
)
NAMESPACES = Call(
    "namespaces",
    "GET",
    "/v1/namespaces",
    "Namespaces that hold something or are in use, a page at a time",
    NamespacesResponse,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
        "after": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
)
PREFETCH = Call(
    "prefetch",
    "POST",
    "/v1/prefetch",
    "Start bringing a prompt nearer; answers with a job",
    Job,
    PrefetchRequest,
    status=HTTPStatus.ACCEPTED,
    changes=True,
    safe=False,
    errors=(409, 429),
    example={"namespace": _NAME, "tokens": [128000, 2675, 527, 264], "to": "host"},
    answer=_JOB | {"state": "pending", "moved_tokens": 0},
)
JOB = Call("job", "GET", "/v1/prefetch/{id}", "How a prefetch stands", Job, changes=True, errors=(404,), answer=_JOB)
CANCEL = Call(
    "cancel",
    "DELETE",
    "/v1/prefetch/{id}",
    "Give up what a prefetch has not moved",
    Job,
    changes=True,
    errors=(404,),
    answer=_JOB | {"state": "cancelled", "moved_tokens": 1024},
)
CLEAR = Call(
    "clear",
    "POST",
    "/v1/clear",
    "Forget what nobody uses: by tier, namespace, age",
    ClearResponse,
    ClearRequest,
    changes=True,
    safe=False,
    errors=(404, 409),
    example={"tier": "all", "namespace": _NAME, "older_than_s": 3600},
    answer={
        "complete": False,
        "device": {"cleared": 128, "kept": 16, "failed": 0, "pending": 0},
        "host": {"cleared": 8, "kept": 0, "failed": 0, "pending": 0},
        "disk": {"cleared": 12, "kept": 0, "failed": 0, "pending": 0},
    },
)
METRICS = Call("metrics", "GET", "/metrics", "Prometheus metrics", None)
HEALTH = Call("health", "GET", "/healthz", "Whether the process answers", Health, open=True, answer={"status": "ok"})
READY = Call("ready", "GET", "/readyz", "Whether it serves: not while it stops", Health, open=True, errors=(503,))

CALLS = (LOOKUP, STATS, NAMESPACE_STATS, NAMESPACES, PREFETCH, JOB, CANCEL, CLEAR, METRICS, HEALTH, READY)
