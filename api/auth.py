"""Bearer tokens: who asks, and what that lets them see."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from starlette.requests import Request

from radixkv.api.options import ServiceConfig
from radixkv.api.problems import ProblemError
from radixkv.keys import Namespace


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. salt: of the tenant that the token is bound to; None: everything is theirs. named: namespaces it named
    not long ago, for ``namespace_of``: of nobody else, or the time an answer takes would tell who else named them.
    """

    salt: bytes | None = None
    named: dict[tuple[str, ...], Namespace] = field(default_factory=dict, compare=False, repr=False)


class Guard:
    """The configured tokens, as digests of one length: comparing them takes the same time for all."""

    def __init__(self, config: ServiceConfig) -> None:
        self._anybody = Caller()
        self._known = [(_digest(secret), self._anybody) for secret in [config.secret()] if secret]
        self._known += [(_digest(tenant.token), Caller(tenant.salt.encode())) for tenant in config.tenants]
        self._reads = config.reads_need_token

    def caller(self, request: Request, *, changes: bool) -> Caller:
        """Who asks. Raises ProblemError: 403 (the route is off: no token is configured) or 401."""
        given = request.headers.get("authorization")
        if changes and not self._known:
            raise ProblemError(
                403, "no-token-configured", "this route is off: the service has no bearer token configured"
            )
        if given is None and not changes and not self._reads:
            return self._anybody
        found: Caller | None = None
        scheme, _, secret = (given or "").partition(" ")
        digest = _digest(secret.strip())
        for known, caller in self._known:  # all of them, whatever the first says
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            said = "a bearer token is needed" if given is None else "the service knows no such bearer token"
            raise ProblemError(401, "unauthorized", said, {"www-authenticate": 'Bearer realm="radixkv"'})
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("latin-1", "replace")).digest()
