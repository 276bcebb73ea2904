"""The OpenAPI description of the door's routes, made from the models that check what callers send."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvprefetch.daemon.door.app import ROUTES, Route
from kvprefetch.daemon.door.envelope import Prefetch, Problem

PROBLEMS = {
    400: "a bad field",
    401: "no token, or a wrong one, over TCP",
    403: "this user may not attach",
    404: "no such engine, message or path",
    409: "another body had this message_id",
    413: "the body is too large",
    422: "prompts cannot be hashed as this engine does",
    429: "too many actions a second; try again after Retry-After",
    503: "the daemon does not answer; try again",
}
REF = "#/components/schemas/{model}"


def describe() -> dict[str, Any]:
    """Return the description, as docs/reference/openapi.json has it."""
    models: set[type[BaseModel]] = {Prefetch, Problem}
    models |= {model for route in ROUTES for model in (route.takes, route.answers) if model is not None}
    ordered = sorted(models, key=lambda each: each.__name__)
    _, schemas = models_json_schema([(each, "validation") for each in ordered], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvprefetchd: hints before requests", "version": "0.1"},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    said: dict[str, Any] = {
        "summary": route.summary,
        "responses": {str(route.status): {"description": "as asked", "content": _json(route.answers.__name__)}},
    }
    for status, meaning in PROBLEMS.items():
        said["responses"][str(status)] = {"description": meaning, "content": _json(Problem.__name__)}
    if route.takes is not None:
        said["requestBody"] = {"required": True, "content": _json(route.takes.__name__)}
    if "{" in route.path:
        name = {"name": "message_id", "in": "path", "required": True, "schema": {"type": "string"}}
        wait = {"name": "wait_ms", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 30_000}}
        said["parameters"] = [name, wait]
    return said


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
