"""Names, JSON bodies, statuses and errors of the HTTP API, as /openapi.json describes them."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field

from ctta.errors import InputError

#: A regular expression for Python and for OpenAPI alike.
STREAM_NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
EXAMPLE_STREAM = "camera7"
#: Statuses of a request that has a body and waits for a stream.
STREAM_ERRORS = (408, 409, 413, 415, 429, 500, 503, 504)
logger = logging.getLogger("ctta.serve")

OUT_OF_MEMORY, DISK, INTERNAL = "out_of_memory", "disk", "internal"  # causes of a failure, as the metrics count them
RETRY_AFTER_OUT_OF_MEMORY, _RETRY_AFTER_DISK_ERROR = 10, 30  # seconds


class ApiError(Exception):
    """An answer with an HTTP error status.

    Args:
        status: HTTP status code.
        message: One sentence for the client that says what is wrong and what to do.
        retry_after: Seconds after which the same request may succeed; None if it will not.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the machine ran out of memory, also if that is only the cause of an error.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # On the CPU, and on some accelerators, torch raises a plain RuntimeError.
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text.lower() or "DefaultCPUAllocator" in text):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def hide_internal_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors that are not the client's fault into an :class:`ApiError` that withholds their text.

    ``ApiError`` and ``InputError`` pass. Everything else is logged with its traceback, counted, and answered with
    status 500; if memory ran out, the answer says that the same request may succeed later.

    Args:
        task: What is done within, for the log.
        on_failure: Called with the cause, ``"out_of_memory"`` or ``"internal"``.
    """
    try:
        yield
    except (ApiError, InputError):
        raise
    except Exception as error:
        logger.error("%s failed", task, exc_info=error)
        if is_out_of_memory(error):
            on_failure(OUT_OF_MEMORY)
            message = "the service ran out of memory; nothing was changed: send the request again later"
            raise ApiError(500, message, retry_after=RETRY_AFTER_OUT_OF_MEMORY) from error
        on_failure(INTERNAL)
        raise ApiError(500, "the network or the service failed; nothing was changed: see the service's log") from error


@contextmanager
def report_disk_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors of the disk into an :class:`ApiError` with status 503: they may be temporary, such as a full disk.

    Only for blocks in which an ``OSError`` comes from the service's own files, and not from a network.

    Args:
        task: What is done within, for the log and the client.
        on_failure: Called with the cause, ``"disk"``.
    """
    try:
        yield
    except OSError as error:
        logger.error("%s failed", task, exc_info=error)
        on_failure(DISK)
        reason = error.strerror or "disk error"  # the whole text may contain paths
        raise ApiError(
            503,
            f"{task} failed ({reason}); nothing was changed: send the request again later",
            retry_after=_RETRY_AFTER_DISK_ERROR,
        ) from error


def validate_stream_name(name: str) -> str:
    """Return the name of a stream, which becomes part of paths and URLs, or raise :class:`ApiError`."""
    if not re.fullmatch(STREAM_NAME_PATTERN, name):
        raise ApiError(
            400,
            "a stream name starts with a letter or digit and has up to 64 letters, digits, dots, dashes or underscores",
        )
    return name


class ErrorResponse(BaseModel):
    """Body of every answer with an error status."""

    error: str


class Prediction(BaseModel):
    """The most probable class of an image."""

    class_: int = Field(alias="class")
    label: str | None
    confidence: float


class FeedbackRequest(BaseModel):
    """Labels for some of the last answers of a stream: the number of the right class of each, or its name."""

    ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**63)]] = Field(max_length=10_000)
    labels: list[Annotated[int, Field(strict=True, ge=0, lt=2**31)] | Annotated[str, Field(strict=True)]] = Field(
        max_length=10_000
    )


class FeedbackResponse(BaseModel):
    """What the labels say about the last answers of a stream, with and without adaptation."""

    stream: str
    num_labels: int
    accuracy: float | None
    source_accuracy: float | None
    gain: float | None
    low: float | None
    high: float | None
    unknown: int


class ImageResponse(Prediction):
    """The prediction of a stream, and on request that of the source network."""

    id: int | None
    stream: str
    update: int
    adapted: bool
    reason: str | None
    batch_stats: float
    resized: tuple[int, int] | None
    source: Prediction | None


_ERRORS = {
    400: "malformed request",
    401: "missing or unknown token",
    403: "token without permission, or cross-origin request",
    404: "not found",
    408: "the body arrived too slowly",
    409: "conflict with the state of the stream",
    413: "body or images too large",
    415: "unsupported Content-Encoding",
    429: "too many requests; see Retry-After",
    500: "the network or the service failed; the stream is unchanged",
    503: "temporarily unavailable; see Retry-After",
    504: "timeout; the update continues and will count",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error statuses of a route; those of authentication are always among them."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in (*statuses, 401, 403)}


def describe_body(
    *media_types: str, schema: dict[str, Any] | None = None, examples: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Describe a request body of one of several media types; binary without a schema. Examples are by media type."""
    content: dict[str, dict[str, Any]] = {
        name: {"schema": schema or {"type": "string", "format": "binary"}} for name in media_types
    }
    for name, found in (examples or {}).items():
        if found:
            content[name]["examples"] = found
    return {"requestBody": {"required": True, "content": content}}


def binary_response(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Describe a successful answer that is not JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}}


_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sequence_id": {
            "description": "name of the stream",
            "oneOf": [{"type": "string", "pattern": STREAM_NAME_PATTERN}, {"type": "integer", "minimum": 0}],
        },
        "adapt": {"type": "boolean", "description": "false to predict without adapting"},
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


def path_example(value: str) -> dict[str, Any]:
    """Return the example of a parameter, for ``openapi_examples``.

    Args:
        value: The example.
    """
    return {value: {"value": value}}
