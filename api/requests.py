"""What requests say, as the cache takes it."""

from __future__ import annotations

import base64
import binascii
import hmac
import struct

import numpy as np

from radixkv import rest
from radixkv.api.auth import Caller
from radixkv.api.problems import ProblemError
from radixkv.errors import ConfigError
from radixkv.keys import Namespace
from radixkv.types import TOKEN_BYTES, Tokens

NAMED = 64
"""Namespaces remembered for each caller at most."""
NAMED_TEXT = 1024
"""Characters of the names of one that is."""


def namespace_of(name: rest.NamespaceName, caller: Caller, where: str) -> Namespace:
    """The namespace a request names, with the caller's salt. Raises ProblemError: 422 for one that is none, 403 for
    another tenant's, whether there is such a namespace or not.
    """
    key = (name.model, name.revision, name.adapter, name.kv_format, name.salt, name.salt_base64)
    known = caller.named.get(key)
    if known is not None:
        return known
    found = _namespace_of(name, caller, where)
    if sum(map(len, key)) <= NAMED_TEXT:
        if len(caller.named) >= NAMED:
            caller.named.clear()
        caller.named[key] = found
    return found


def _namespace_of(name: rest.NamespaceName, caller: Caller, where: str) -> Namespace:
    salt = name.salt.encode()
    if name.salt_base64:
        if salt:
            raise _invalid(f"salt and salt_base64 are two answers to one question - at `{where}`")
        salt = _decode(name.salt_base64, f"{where}.salt_base64")
    if caller.salt is not None:
        if salt and not hmac.compare_digest(salt, caller.salt):
            raise ProblemError(403, "other-tenant", "the token is bound to another salt")
        salt = caller.salt
    try:
        return Namespace(name.model, name.revision, name.adapter, salt, name.kv_format)
    except ConfigError as error:
        raise _invalid(f"{error} - at `{where}`") from None


def tokens_of(tokens: list[int] | str | Tokens, where: str) -> Tokens:
    """Token ids as the cache takes them; a list or an array has been checked already. Raises ProblemError: 422."""
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, list):
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)  # a third of an array's own time
    raw = _decode(tokens, where)
    if len(raw) % TOKEN_BYTES:
        raise _invalid(f"{len(raw)} bytes are no whole number of int32 tokens - at `{where}`")
    out = np.frombuffer(raw, "<i4").astype(np.int32, copy=False)
    if len(out) and int(out.min()) < 0:
        at = int((out < 0).argmax())
        raise _invalid(f"token {int(out[at])} at position {at} is negative - at `{where}`")
    return out


def check_count(count: int, limit: int) -> None:
    """Raise ProblemError (413) for more tokens than one request may have."""
    if count > limit:
        raise ProblemError(413, "too-many-tokens", f"{count} tokens are over the limit of {limit} a request")


def _decode(text: str, where: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(f"no base64 - at `{where}`") from None
    if base64.b64encode(raw).decode() != text:
        raise _invalid(f"base64 whose last bits are not zero - at `{where}`")
    return raw


def _invalid(detail: str) -> ProblemError:
    return ProblemError(422, "invalid-request", detail)
