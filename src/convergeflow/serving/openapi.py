"""The OpenAPI description of the server, from the same models that check its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from convergeflow import __version__
from convergeflow.serving.limits import Limits
from convergeflow.serving.requests import Completion

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "One sentence that names the fix."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "text_completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "text", "finish_reason", "convergeflow"],
                "properties": {
                    "index": {"type": "integer"},
                    "text": {"type": "string"},
                    "finish_reason": {"const": "length"},
                    "logprobs": {"type": "null"},
                    "convergeflow": {"type": "object", "required": ["seed", "calls", "text", "tokens"]},
                },
            },
        },
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "completion_tokens", "total_tokens", "network_calls"],
            "additionalProperties": {"type": "integer"},
        },
    },
}
MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "convergeflow"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"}},
}
MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
    },
}
PLAN = {
    "type": "object",
    "required": ["calls", "steps", "seconds", "settings"],
    "properties": {
        "calls": {"type": "integer"},
        "steps": {"type": "integer"},
        "seconds": {"type": ["number", "null"]},
        "settings": {"type": ["object", "null"]},
    },
}
STATUSES = {
    "400": "The request cannot be served as it is; the message names the fix.",
    "401": "A token is needed.",
    "404": "There is no such thing here.",
    "405": "Another method is needed.",
    "408": "The body did not arrive.",
    "413": "The body is too large.",
    "415": "The body must be JSON.",
    "422": "The request was understood and failed; the message says why.",
    "429": "The queue is full; Retry-After says when to come back.",
    "500": "The server failed.",
    "503": "The request took longer than this server grants, or the server is closing.",
}


def describe(limits: Limits, secured: bool, models: Sequence[str]) -> dict[str, Any]:
    """The whole description."""
    _, definitions = models_json_schema([(Completion, "validation")], ref_template="#/components/schemas/{model}")
    schemas = {**definitions["$defs"], "Error": ERROR, "Answer": ANSWER, "Model": MODEL, "Models": MODELS, "Plan": PLAN}
    schemas["Completion"]["properties"]["model"]["enum"] = list(models)
    body = {"required": True, "content": _json("Completion")}
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    streamed = {"text/event-stream": {"schema": {"type": "string"}}}
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "ConvergeFlow",
            "version": __version__,
            "description": "Completions by flows that converge to tokens. A sample depends on its model, settings and "
            f"seed alone. Limits: {', '.join(f'{name} {value:g}' for name, value in vars(limits).items())}.",
        },
        "paths": {
            "/v1/completions": {
                "post": {
                    "operationId": "complete",
                    "requestBody": body,
                    "responses": _responses({**_json("Answer"), **streamed}, "400 401 404 408 413 415 422 429 500 503"),
                }
            },
            "/v1/models": {"get": {"operationId": "models", "responses": _responses(_json("Models"), "401")}},
            "/v1/models/{model}": {
                "get": {
                    "operationId": "model",
                    "parameters": [named],
                    "responses": _responses(_json("Model"), "401 404"),
                }
            },
            "/plan": {
                "post": {
                    "operationId": "plan",
                    "summary": "What a request would cost, without making it.",
                    "requestBody": body,
                    "responses": _responses(_json("Plan"), "400 401 404 408 413 415"),
                }
            },
            "/healthz": {
                "get": {
                    "operationId": "health",
                    "responses": _responses({"application/json": {"schema": {"type": "object"}}}, "503"),
                }
            },
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "responses": _responses({"text/plain": {"schema": {"type": "string"}}}, "401"),
                }
            },
        },
        "components": {"schemas": schemas},
    }
    if secured:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]
        description["paths"]["/healthz"]["get"]["security"] = []
    return description


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _responses(content: dict[str, Any], failures: str) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status in failures.split():
        found[status] = {"description": STATUSES[status], "content": _json("Error")}
    return found
