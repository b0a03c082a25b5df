"""What goes over the wire between the REST service and its clients: one definition for both, and for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from radixkv.keys import MAX_TOKEN

MAX_PROMPTS = 256
"""Prompts of one lookup at most."""
MAX_PROMPT_TOKENS = 1 << 19
"""Tokens of one request at most, over all its prompts (a service may be set to less)."""
MAX_TEXT = 16384
"""Characters of one part of a namespace at most: 64 KiB of UTF-8."""

_ANY = "[A-Za-z0-9+/]"
_FIRST = f"{_ANY}{{4}}[A-Za-f]"
_SECOND = f"{_ANY}{{4}}[A-HQ-Xg-nw-z0-3]"
_THIRD = f"{_ANY}{{4}}[ABEFIJMNQRUVYZcdghklopstwx014589]{_ANY}"
BASE64_TOKENS = f"^(?:{_FIRST}{_SECOND}{_THIRD})*(?:{_FIRST}[AQgw]==|{_FIRST}{_SECOND}[AEIMQUYcgkosw048]=)?$"
"""Base64, padded, of little-endian int32 numbers whose sign bits are 0."""

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Token = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
TokenList = Annotated[  # a longer one is refused with its count, as many that sum to more are: no fault of its form
    list[Token],
    Meta(extra_json_schema={"maxItems": MAX_PROMPT_TOKENS}, description="Token ids: integers, strictly."),
]
TokenText = Annotated[
    str,
    Meta(
        extra_json_schema={
            "maxLength": (MAX_PROMPT_TOKENS * 4 + 2) // 3 * 4,
            "pattern": BASE64_TOKENS,
            "contentEncoding": "base64",
        },
        description="Token ids as base64 (RFC 4648, padded) of little-endian int32: a third of the size of a list.",
    ),
]
Tokens = TokenList | TokenText
NamespaceId = Annotated[
    str, Meta(pattern="^[0-9a-f]{32}$", description="What `GET /v1/namespaces` calls a namespace; of this process.")
]


class NamespaceName(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What decides the KV of a prompt beside its tokens, as in `radixkv.Namespace`.

    `salt` is a tenant's secret; where it is no text, `salt_base64` is its bytes. A token that is bound to a tenant
    fills it in.
    """

    model: Text
    revision: Text = ""
    adapter: Text = ""
    kv_format: Text = ""
    salt: Text = ""
    salt_base64: Annotated[
        str,
        Meta(
            max_length=4 * MAX_TEXT,
            extra_json_schema={
                "pattern": f"^(?:{_ANY}{{4}})*(?:{_ANY}[AQgw]==|{_ANY}{{2}}[AEIMQUYcgkosw048]=)?$",
                "contentEncoding": "base64",
            },
        ),
    ] = ""


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """One prompt in one namespace."""

    namespace: NamespaceName
    tokens: Tokens


class LookupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts to look up, of any namespaces."""

    prompts: Annotated[list[Prompt], Meta(min_length=1, max_length=MAX_PROMPTS)]


class Coverage(msgspec.Struct):
    """Leading tokens of a prompt that each tier or a nearer one has: device <= host <= disk = covered. `usable_tokens`
    is one less than the prompt at most, since its last token must be computed. By the time of a request it may be less.
    """

    device_tokens: Count
    host_tokens: Count
    disk_tokens: Count
    covered_tokens: Count
    usable_tokens: Count


class LookupResponse(msgspec.Struct):
    """What is cached of each prompt, in their order."""

    results: list[Coverage]


class HitTokens(msgspec.Struct):
    """Tokens that requests took from each tier, and in all."""

    device: Count
    host: Count
    disk: Count
    total: Count


class TierUse(msgspec.Struct):
    """What a tier holds. `count`: pages on the device, chunks elsewhere."""

    count: Count
    bytes: Count


class Usage(msgspec.Struct):
    """Requests and their hits since the service's cache was opened, and what is cached now.

    `device_tokens`, `unfilled_slots`, `pinned_tokens`: on device pages. `unique_tokens`: that some tier has, once.
    """

    queries: Count
    queried_tokens: Count
    hit_tokens: HitTokens
    hit_rate: Share
    device: TierUse
    host: TierUse
    disk: TierUse
    device_tokens: Count
    unfilled_slots: Count
    pinned_tokens: Count
    unique_tokens: Count
    open_leases: Count


class Capacity(msgspec.Struct):
    """How full a tier is; on the device pages of running requests count."""

    capacity_bytes: Count
    used_bytes: Count
    occupancy: Share


class Pages(msgspec.Struct):
    """Device pages by state; they sum to `total`."""

    total: Count
    free: Count
    private: Count
    cached: Count
    loading: Count
    draining: Count


class Evictions(msgspec.Struct):
    """Pages (device) or chunks that left a tier, by reason: `room` for something newer, `ahead` of need by the low
    watermark, `asked` for by a call, `cleared` by a clear or a new revision.
    """

    room: Count
    ahead: Count
    asked: Count
    cleared: Count


class EvictionsByTier(msgspec.Struct):
    """Evictions of each tier."""

    device: Evictions
    host: Evictions
    disk: Evictions


class Drops(msgspec.Struct):
    """What was not kept or not stored. `stores`: copies to the host refused; `writes`: to the disk; `leases`: never
    closed by their owner; `records`: lost after failed reads; `stale`: copies that ended too late to be used.
    """

    stores: Count
    writes: Count
    leases: Count
    records: Count
    stale: Count


class Copies(msgspec.Struct):
    """Copies of one kind since the start."""

    count: Count
    bytes: Count
    seconds: Seconds


class Moves(msgspec.Struct):
    """Copies by direction: `store` device to host, `load` host to device, `write` host to disk, `read` disk to host."""

    store: Copies
    load: Copies
    write: Copies
    read: Copies


class Resumed(msgspec.Struct):
    """Preempted requests that came back; their hits are their own KV and no part of `usage`."""

    queries: Count
    queried_tokens: Count
    hit_tokens: Count


class InFlight(msgspec.Struct):
    """Copies under way: towards the device, and in all."""

    loads: Count
    total: Count


class CacheState(msgspec.Struct):
    """The cache as a whole. `corrupt`: records that failed verification. `load_failures`: loads that did not come."""

    device: Capacity
    host: Capacity
    disk: Capacity
    pages: Pages
    evictions: EvictionsByTier
    drops: Drops
    moves: Moves
    resumed: Resumed
    in_flight: InFlight
    corrupt: Count
    load_failures: Count


class StatsResponse(msgspec.Struct):
    """`source`: a `cache`, or a `store` folder that another process may be writing. `cache` is null for a token that is
    bound to a tenant, whose `usage` is of that tenant's namespaces alone.
    """

    source: Literal["cache", "store"]
    usage: Usage
    cache: CacheState | None


class NamespaceEntry(msgspec.Struct):
    """A namespace with its counts. `salt_digest`: the first 8 hex digits of the salt's SHA-256, empty without a salt.
    `named` is false where only a disk index knows the namespace and its name is lost.
    """

    id: NamespaceId
    named: bool
    model: str
    revision: str
    adapter: str
    kv_format: str
    salt_digest: str
    usage: Usage


class NamespacesResponse(msgspec.Struct):
    """Namespaces by id. `next`: what to give as `after` for the rest; null: there are no more."""

    namespaces: list[NamespaceEntry]
    next: NamespaceId | None


class PrefetchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Bring what outer tiers have of a prompt nearer: to the `host`, or to the `device`."""

    namespace: NamespaceName
    tokens: Tokens
    to: Literal["host", "device"] = "host"


class Job(msgspec.Struct):
    """A prefetch. All states but `pending` are final; `partial`: a read failed or found no room."""

    id: str
    state: Literal["pending", "done", "partial", "cancelled"]
    to: Literal["host", "device"]
    wanted_tokens: Count
    moved_tokens: Count


class ClearRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What to forget: in one tier or `all`; of one namespace, named or by its id; what was last used so many seconds
    ago. What requests or copies use stays, and is counted.
    """

    tier: Literal["device", "host", "disk", "all"]
    namespace: NamespaceName | NamespaceId | None = None
    older_than_s: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None


class ClearedTier(msgspec.Struct):
    """`kept`: matched but in use. `failed`: the disk did not delete them, though nobody is served from them any more.
    `pending`: deletes that had not ended when this was said.
    """

    cleared: Count
    kept: Count
    failed: Count
    pending: Count


class ClearResponse(msgspec.Struct):
    """By tier; pages on the device, chunks elsewhere. `complete`: all that was asked for is gone."""

    complete: bool
    device: ClearedTier
    host: ClearedTier
    disk: ClearedTier


class Health(msgspec.Struct):
    """`status`: ok, or why not."""

    status: str


class Problem(msgspec.Struct, omit_defaults=True):
    """An error, in the form of RFC 9457. `type`: what went wrong, for programs. `detail`: for people."""

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str = ""
