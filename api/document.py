"""The service's OpenAPI document, made of the calls in ``radixkv.rest``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from radixkv import __version__, calls, rest
from radixkv.api.problems import MEDIA_TYPE

_REF = "#/components/schemas/{name}"
_ABOUT = {
    400: "The body is no JSON that this service accepts.",
    401: "A bearer token is needed.",
    403: "The token is not for this: another tenant's, or the route is off because no token is configured.",
    404: "There is no such thing, or it is not the caller's.",
    408: "The body arrived too slowly.",
    409: "It cannot be done as things are: no room on the device, or a store that is served read-only.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    422: "The body, or a parameter, is not what the call takes.",
    429: "Too many prefetches are under way.",
    503: "Too much is under way, the store cannot be read, or the service stops.",
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = {kind for call in calls.CALLS for kind in (call.request, call.response) if kind is not None}
    order = sorted(types | {rest.Problem}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(order, ref_template=_REF)
    schemas["NamespaceName"]["not"] = {"required": ["salt", "salt_base64"]}
    paths: dict[str, dict[str, Any]] = {}
    for call in calls.CALLS:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "radixkv",
            "version": __version__,
            "description": "Which tokens of a prompt are cached, and where; how the cache is doing; prefetch, clear.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(call: calls.Call) -> dict[str, Any]:
    out: dict[str, Any] = {"operationId": call.name, "summary": call.summary}
    out["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("id", "namespace")
        if f"{{{name}}}" in call.path
    ]
    out["parameters"] += [{"name": name, "in": "query", "schema": schema} for name, schema in call.query.items()]
    if call.request is not None:
        content = {"schema": {"$ref": _REF.format(name=call.request.__name__)}, "example": call.example}
        out["requestBody"] = {"required": True, "content": {"application/json": content}}
    if not call.open:  # a route that only reads may be open: see serve.read_access
        out["security"] = [{"bearer": []}] if call.changes else [{"bearer": []}, {}]
    out["responses"] = {str(int(call.status)): _answer(call)}
    for status in call.statuses:
        out["responses"][str(status)] = {
            "description": _ABOUT[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(name="Problem")}, "example": _problem(status)}},
        }
    return out


def _problem(status: int) -> dict[str, Any]:
    title = HTTPStatus(status).phrase
    kind = title.lower().replace(" ", "-")
    return {"type": f"urn:radixkv:problem:{kind}", "title": title, "status": status, "detail": _ABOUT[status]}


def _answer(call: calls.Call) -> dict[str, Any]:
    description = HTTPStatus(call.status).phrase
    if call.response is None:
        return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = {"$ref": _REF.format(name=call.response.__name__)}
    content: dict[str, Any] = {"schema": schema} if call.answer is None else {"schema": schema, "example": call.answer}
    out: dict[str, Any] = {"description": description, "content": {"application/json": content}}
    if call.status == HTTPStatus.ACCEPTED:
        out["headers"] = {"Location": {"schema": {"type": "string"}, "description": "Where the job can be asked for."}}
    return out
