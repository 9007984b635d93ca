"""What /openapi.json says of bodies and answers that no annotation describes."""

from typing import Any

from pydantic import BaseModel, Field

from ctta.serve.names import PATTERN


class Problem(BaseModel):
    """Every answer that is no success."""

    error: str


class Guess(BaseModel):
    """What an image is taken for."""

    class_: int = Field(alias="class")
    label: str | None
    confidence: float


class Label(Guess):
    """What an image is taken for by a stream, and by the network as it was trained if that was asked for."""

    stream: str
    update: int
    adapted: bool
    reason: str | None
    source: Guess | None


_REASONS = {
    400: "the request makes no sense",
    401: "a token is missing",
    403: "not with this token, or not from there",
    404: "there is no such thing",
    408: "the body came too slowly",
    409: "not in this state",
    413: "too large",
    415: "compressed",
    429: "too many at once; see Retry-After",
    503: "not now; see Retry-After",
    504: "too slow",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route."""
    return {status: {"model": Problem, "description": _REASONS[status]} for status in (*statuses, 401, 403)}


def body_of(*types: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """A body of one of some media types, bytes if not told otherwise."""
    described = {"schema": schema or {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": {name: described for name in types}}}


def answer_of(media_type: str) -> dict[int | str, dict[str, Any]]:
    """A success that is not JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}}


_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sequence_id": {
            "description": "the stream",
            "oneOf": [{"type": "string", "pattern": PATTERN}, {"type": "integer", "minimum": 0}],
        },
        "adapt": {"type": "boolean", "description": "false to only predict"},
        "binary_data_output": {"type": "boolean"},
    },
}
_INPUT: dict[str, Any] = {
    "type": "object",
    "required": ["name", "datatype", "shape", "data"],
    "properties": {
        "name": {"const": "input"},
        "datatype": {"enum": ["FP32", "FP64", "FP16", "UINT8"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 4, "maxItems": 4},
        "data": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}},
    },
}
INFER_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": _INPUT},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"enum": ["logits", "label", "confidence"]}},
            },
        },
    },
}
