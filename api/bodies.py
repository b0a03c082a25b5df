"""Request bodies: read within limits, parsed strictly."""

from __future__ import annotations

import asyncio
import codecs
import json
import sys
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from radixkv import rest
from radixkv.api.problems import ProblemError, overloaded
from radixkv.keys import MAX_TOKEN
from radixkv.types import Tokens

T = TypeVar("T")

SMALL_BODY = 1 << 18
"""Bodies up to this many bytes are read at once; of larger ones only a few at a time."""
LARGE_AT_ONCE = 8


class Bodies:
    """Reads bodies of one service. max_bytes, timeout_s: of each."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def read(self, request: Request) -> bytes:
        """The body. Raises ProblemError: 415 (no JSON), 413 (too large, before it is read where its length is given),
        408 (too slow), 503 (too many large ones under way).
        """
        headers = headers_of(request)
        _check_type(headers)
        length = headers.get(b"content-length", b"").decode("latin-1")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        if b"transfer-encoding" not in headers and length.isdecimal() and int(length) <= SMALL_BODY:
            message = await self._next(request, self._timeout_s)
            body: bytes = message.get("body", b"")
            if not message.get("more_body"):
                return body
            return await self._rest(request, bytearray(body))
        return await self._rest(request, bytearray())

    async def _rest(self, request: Request, body: bytearray) -> bytes:
        """What follows ``body``, which grows."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        large = False
        try:
            more = True
            while more:
                message = await self._next(request, deadline - loop.time())
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > self._max_bytes:
                    raise self._too_large()
                if len(body) > SMALL_BODY and not large:
                    await self._turn(deadline - loop.time())
                    large = True
            return bytes(body)
        finally:
            if large:
                self._large.release()

    @property
    def crowded(self) -> bool:
        """Whether large bodies wait for others."""
        return self._large.locked()

    async def _turn(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._large.acquire()
        except TimeoutError:
            raise overloaded("too many large bodies are being read") from None

    async def _next(self, request: Request, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                message = await request.receive()
        except TimeoutError:
            raise ProblemError(
                408, "slow-body", f"the body did not arrive within {self._timeout_s:g} seconds"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    def _too_large(self) -> ProblemError:
        return ProblemError(413, "body-too-large", f"the body is over the limit of {self._max_bytes} bytes")


class _NoJSONError(ValueError):
    """The body is no strict JSON, and why."""


class ClientGoneError(Exception):
    """The client has closed its connection: nobody reads an answer."""


def headers_of(request: Request) -> dict[bytes, bytes]:
    """A request's headers by name, of two with one name the first, as ``request.headers`` finds by a walk each time."""
    return dict(reversed([*request.scope["headers"]]))


def _check_type(headers: dict[bytes, bytes]) -> None:
    kind, _, parameters = headers.get(b"content-type", b"").decode("latin-1").partition(";")
    charset = parameters.strip().lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise ProblemError(415, "not-json", "the body must be JSON in UTF-8, sent as content-type: application/json")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ProblemError(415, "encoded-body", "a body must be sent as it is, without a content-encoding")


def parse(body: bytes, kind: type[T]) -> T:
    """A body as a value of ``kind``: strict JSON (UTF-8, no key twice, no NaN, no lone surrogate), strictly converted.
    Raises ProblemError: 400 (no such JSON) or 422 (naming the place).
    """
    if body.startswith(codecs.BOM_UTF8):
        raise ProblemError(400, "malformed-json", "the body begins with a byte order mark, which JSON does not have")
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if "\\u" in text:
            _check_text(value)
    except RecursionError:
        raise ProblemError(400, "malformed-json", "the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ProblemError(400, "malformed-json", f"the body is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ProblemError(400, "malformed-json", f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except _NoJSONError as error:
        raise ProblemError(400, "malformed-json", str(error)[:200]) from None
    except ValueError:  # all that is left: the interpreter's own limit
        raise ProblemError(
            400, "malformed-json", f"a number has more than {sys.get_int_max_str_digits():,} digits"
        ) from None
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ProblemError(422, "invalid-request", str(error)) from None
    except (RecursionError, OverflowError) as error:
        raise ProblemError(422, "invalid-request", str(error)[:200]) from None


class _Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """``rest.Prompt``, its tokens found to be JSON and left as they are."""

    namespace: rest.NamespaceName
    tokens: msgspec.Raw


class _Lookup(msgspec.Struct, forbid_unknown_fields=True):
    """``rest.LookupRequest``, of these."""

    prompts: Annotated[list[_Prompt], msgspec.Meta(min_length=1, max_length=rest.MAX_PROMPTS)]


_decode_lookup = msgspec.json.Decoder(_Lookup).decode
_decode_text = msgspec.json.Decoder(str).decode


def parse_lookup(body: bytes) -> list[tuple[rest.NamespaceName, Tokens | str]] | None:
    """The prompts that ``parse`` finds in a body, in a quarter of its time; None where that is not certain, which is
    for ``parse`` to tell. Lists of tokens are checked and are arrays; base64 is still text.

    msgspec's own parser takes what ``parse`` takes, but for a key that stands twice, of which it keeps the last. Where
    nothing is escaped the quotes tell: there are two for each key and each text that the value has, and no more.
    """
    if b"\\" in body:
        return None
    try:
        asked = _decode_lookup(body)
        texts = 1
        out: list[tuple[rest.NamespaceName, Tokens | str]] = []
        for prompt in asked.prompts:
            name = prompt.namespace
            given = (name.revision, name.adapter, name.kv_format, name.salt, name.salt_base64)
            texts += 4 + 2 * (len(given) - given.count(""))
            raw = bytes(prompt.tokens)
            if raw.startswith(b'"'):
                texts += 1
                out.append((name, _decode_text(raw)))
                continue
            tokens = _numbers(raw)
            if tokens is None:
                return None
            out.append((name, tokens))
    except (msgspec.MsgspecError, RecursionError):
        return None
    return out if body.count(b'"') == 2 * texts else None


def _numbers(raw: bytes) -> Tokens | None:
    """A list of tokens out of what is JSON already: no number becomes an object on the way. None: not only tokens."""
    if raw.translate(None, b"0123456789, \n") != b"[]":
        return None
    if not (text := raw[1:-1].strip()):
        return np.empty(0, np.int32)
    found = np.fromstring(text, np.int64, sep=",")
    return found.astype(np.int32) if int(found.max()) <= MAX_TOKEN else None  # a number over 64 bits is their largest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _NoJSONError(f"the key {ascii(key)[:80]} stands twice in one object")
            seen.add(key)
    return out


def _no_number(name: str) -> NoReturn:
    raise _NoJSONError(f"{name} is no number in JSON")


def _check_text(value: Any) -> None:
    """Raise _NoJSONError for half a character written as an escape."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.keys()
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _NoJSONError("a text holds a lone surrogate") from None
