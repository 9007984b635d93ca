"""The Open Inference Protocol, version 2, which clients of Triton and KServe speak: the routes below ``/v2``.

A tensor is a list of JSON numbers, or raw bytes that follow the JSON part of a body; then the header
``Inference-Header-Content-Length`` holds the length of the JSON part.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from fastapi import APIRouter, Depends, Header, Response
from fastapi import Path as PathParameter
from numpy.typing import NDArray
from torch import Tensor

import ctta
from ctta.serve.http import (
    EXAMPLE_STREAM,
    STREAM_ERRORS,
    STREAM_NAME_PATTERN,
    TRIM_THRESHOLD,
    ApiError,
    Authenticator,
    BodyReader,
    IdempotencyKey,
    describe_body,
    error_responses,
    path_example,
    return_freed_memory,
    validate_stream_name,
)
from ctta.serve.service import Service

MODEL_VERSION = "1"
MAX_EXAMPLE_NUMBERS = 4096  # of an image in JSON; larger ones would make most of the description
DEFAULT_STREAM = "default"
MAX_INLINE_BYTES = 4 * 2**20  # that are converted within a few milliseconds

T = TypeVar("T")
INPUT_NAME = "input"
#: Datatypes of inputs; those of UINT8 are pixels, and are divided by 255.
INPUT_TYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "FP16": np.dtype("<f2"),
    "UINT8": np.dtype("u1"),
}
#: Outputs that a request may select, and those of one that selects none: logits may be many times as large.
OUTPUT_NAMES, DEFAULT_OUTPUTS = ("logits", "label", "confidence"), ("label", "confidence")
OUTPUT_TYPES: dict[np.dtype[Any], str] = {np.dtype("<f4"): "FP32", np.dtype("<i8"): "INT64"}
_MAX_RANK = 8
#: Memory of a value in JSON (a number is an object in a list that may just have been grown, an element of arrays of
#: objects and of float64, and a float32), in addition of an array or object, and of any request.
BYTES_PER_VALUE, BYTES_PER_CONTAINER, BYTES_PER_REQUEST = 64, 128, 2**16
MAX_FLOATS_PER_BYTE = 1  # of raw tensors: UINT8
#: The body of a request, as /openapi.json describes it.
INFER_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "sequence_id": {
                    "description": "name of the stream",
                    "oneOf": [{"type": "string", "pattern": STREAM_NAME_PATTERN}, {"type": "integer", "minimum": 0}],
                },
                "adapt": {"type": "boolean", "description": "false to predict without adapting"},
                "binary_data_output": {"type": "boolean"},
            },
        },
        "inputs": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "datatype", "shape", "data"],
                "properties": {
                    "name": {"const": INPUT_NAME},
                    "datatype": {"enum": list(INPUT_TYPES)},
                    "shape": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 1},
                        "minItems": 4,
                        "maxItems": 4,
                    },
                    "data": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}},
                },
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"enum": list(OUTPUT_NAMES)}},
            },
        },
    },
}


# ---- tensors of requests ----


@dataclass(frozen=True)
class InferRequest:
    """A request in two parts."""

    fields: dict[str, Any]  # the JSON part
    data: memoryview  # the bytes that follow it

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the whole request."""
        return _get_parameters(self.fields)


def split_body(body: bytes | bytearray, json_length: str | None) -> InferRequest:
    """Split a body by the header ``Inference-Header-Content-Length``, if there is one."""
    length = _parse_json_length(body, json_length)
    try:
        fields = json.loads(body[:length], parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the request must be a JSON object with 'inputs'")
    return InferRequest(fields, memoryview(body)[length:])  # without copying it


def _parse_json_length(body: bytes | bytearray, json_length: str | None) -> int:
    if json_length is None:
        return len(body)
    is_number = json_length.isascii() and json_length.isdecimal() and len(json_length) < 20
    if not is_number or int(json_length) > len(body):
        raise ApiError(400, f"Inference-Header-Content-Length must be at most {len(body)}, the length of the body")
    return int(json_length)


def estimate_memory(body: bytes | bytearray, json_length: str | None) -> int:
    """Return the memory that parsing a request takes at most, in addition to its body.

    JSON is estimated by what separates its values, before any of them is created: a body of empty lists takes thirty
    times its size, and one of long strings twice.
    """
    length = _parse_json_length(body, json_length)
    num_containers = body.count(b"[", 0, length) + body.count(b"{", 0, length)
    num_values = body.count(b",", 0, length) + body.count(b":", 0, length) + num_containers
    text = length * (1 if body[:length].isascii() else 4)  # as a string, which has up to four bytes per character
    tensor = (len(body) - length) * MAX_FLOATS_PER_BYTE * np.dtype(np.float32).itemsize
    values = BYTES_PER_VALUE * num_values + BYTES_PER_CONTAINER * num_containers
    return BYTES_PER_REQUEST + 2 * text + values + tensor


def parse_input(request: InferRequest) -> NDArray[np.float32]:
    """Return the only input of a request as float32, and drop it: a list takes many times the memory of the array."""
    inputs, name = request.fields.pop("inputs", None), INPUT_NAME
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        raise ApiError(400, f"'inputs' must be a list of one tensor, {name!r}")
    tensor = inputs[0]
    if tensor.get("name") != name:
        raise ApiError(400, f"the model has no input {tensor.get('name')!r}; its only one is {name!r}")
    datatype = tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in INPUT_TYPES:
        raise ApiError(400, f"the datatype of {name!r} must be one of {', '.join(INPUT_TYPES)}, got {datatype!r}")
    shape = _parse_shape(tensor.get("shape"))
    size = _get_parameters(tensor).get("binary_data_size")
    if size is None:
        values = _parse_numbers(tensor.get("data"), datatype, shape)
        if request.data:
            raise ApiError(400, "there are bytes after the JSON that no input claims with binary_data_size")
    else:
        values = _parse_bytes(request.data, size, datatype, shape)
    with np.errstate(over="ignore"):  # what becomes infinite is rejected as such
        floats = values.astype(np.float32)
    if datatype == "UINT8":
        floats /= np.float32(255)
    return floats


def _parse_shape(shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= _MAX_RANK
        or not all(type(length) is int and 0 <= length < 2**31 for length in shape)
    ):
        raise ApiError(400, "'shape' must be a list of integers such as [1, 3, 32, 32]")
    return tuple(shape)


def _parse_numbers(data: Any, datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if _nesting_depth(data) > _MAX_RANK:  # numpy creates arrays of a rank that it cannot iterate over
        raise ApiError(400, f"'data' must be a list of numbers, flat or nested at most {_MAX_RANK} deep")
    try:
        # As objects first: numpy would give every string the length of the longest, which takes any amount of memory.
        numbers = np.array(data, dtype=object)
        kinds = set(map(type, numbers.flat))
        if not kinds <= {int, float}:
            raise ApiError(400, "'data' must be a list of numbers, flat or nested")
        values = numbers.astype(np.float64)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"'data' is not an array of numbers: {error}") from error
    if values.size != prod(shape):
        raise ApiError(400, f"'data' has {values.size} numbers, and the shape {list(shape)} needs {prod(shape)}")
    if datatype == "UINT8" and values.size and not (kinds == {int} and 0 <= values.min() <= values.max() <= 255):
        raise ApiError(400, "'data' of datatype UINT8 must be integers from 0 to 255")
    return values.reshape(shape)


def _nesting_depth(data: Any) -> int:
    """Return how deep the first number is nested, which is the highest rank that numpy may find."""
    depth = 0
    while isinstance(data, list):
        depth += 1
        data = data[0] if data else None
    return depth


def _parse_bytes(data: memoryview, size: Any, datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    expected = prod(shape) * INPUT_TYPES[datatype].itemsize
    if type(size) is not int or size != expected or len(data) != expected:
        raise ApiError(
            400,
            f"{datatype} of shape {list(shape)} takes {expected} bytes; binary_data_size is {size!r}, "
            f"and {len(data)} bytes follow the JSON",
        )
    values: NDArray[Any] = np.frombuffer(data, INPUT_TYPES[datatype]).reshape(shape)
    return values


def _get_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ApiError(400, "'parameters' must be an object")
    return parameters


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


# ---- tensors of responses ----


def make_outputs(logits: Tensor, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return some of the outputs as contiguous arrays, from logits on the host."""
    tensors = {"logits": logits.float()}
    tensors["confidence"], tensors["label"] = logits.double().softmax(1).max(1)
    tensors["confidence"] = tensors["confidence"].float()
    return {name: np.ascontiguousarray(tensors[name].numpy()) for name in names}


def encode_response(
    head: dict[str, Any], outputs: dict[str, NDArray[Any]], selection: dict[str, bool]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON part if bytes follow it.

    ``head`` has its fields beside the outputs, and ``selection`` says of each output whether it is sent as bytes.
    """
    tensors: list[dict[str, Any]] = []
    data: list[memoryview] = []
    for name, is_binary in selection.items():
        values = outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": OUTPUT_TYPES[values.dtype], "shape": list(values.shape)}
        if is_binary:
            tensor["parameters"] = {"binary_data_size": values.nbytes}
            data.append(values.data)
        else:
            tensor["data"] = [
                value if value == value and abs(value) != np.inf else None for value in values.ravel().tolist()
            ]
        tensors.append(tensor)
    text = json.dumps({**head, "outputs": tensors}, allow_nan=False).encode()
    return (b"".join([text, *data]), len(text)) if data else (text, None)


def select_outputs(request: InferRequest) -> dict[str, bool]:
    """Return the names of the selected outputs, and whether each is sent as bytes; the defaults if it names none."""
    selection = request.fields.get("outputs")
    is_binary_default = _get_flag(request.parameters, "binary_data_output")
    if selection is None or selection == []:
        return dict.fromkeys(DEFAULT_OUTPUTS, is_binary_default)
    if not (isinstance(selection, list) and all(isinstance(output, dict) for output in selection)):
        raise ApiError(400, "'outputs' must be a list of objects with a name")
    selected = {}
    for output in selection:
        name, parameters = output.get("name"), _get_parameters(output)
        if not isinstance(name, str) or name not in OUTPUT_NAMES:
            raise ApiError(400, f"the model has no output {name!r}; it has {', '.join(OUTPUT_NAMES)}")
        if "classification" in parameters:
            raise ApiError(400, "the classification extension is not supported: select 'label' and 'confidence'")
        selected[name] = _get_flag(parameters, "binary_data", is_binary_default)
    return selected


def _get_flag(parameters: dict[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"the parameter {name!r} must be true or false, got {value!r}")
    return value


def protocol_routes(service: Service, auth: Authenticator, read_body: BodyReader) -> APIRouter:
    """Return the routes below ``/v2``."""
    router = APIRouter(tags=["Open Inference Protocol"])
    public, infer_scope = [Depends(auth.allow_anyone)], [Depends(auth.require_infer)]
    Model = Annotated[str, PathParameter(openapi_examples=path_example(service.name))]
    Version = Annotated[str, PathParameter(openapi_examples=path_example(MODEL_VERSION))]
    metadata_errors, ready_errors = error_responses(400, 404), error_responses(404, 503)

    @router.get("/v2", dependencies=infer_scope, responses=metadata_errors)
    async def server_metadata() -> dict[str, Any]:
        return {"name": "ctta", "version": ctta.__version__, "extensions": ["binary_tensor_data", "sequence"]}

    @router.get("/v2/health/live", dependencies=public, responses=error_responses())
    async def server_live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", dependencies=public, responses=error_responses(503))
    async def server_ready() -> dict[str, bool]:
        service.check_ready()
        return {"ready": True}

    @router.get("/v2/models/{name}/ready", dependencies=public, responses=ready_errors)
    async def model_ready(name: Model) -> dict[str, Any]:
        _check_model(service, name)
        return {"name": name, **await server_ready()}

    @router.get("/v2/models/{name}/versions/{version}/ready", dependencies=public, responses=ready_errors)
    async def version_ready(name: Model, version: Version) -> dict[str, Any]:
        _check_model(service, name, version)
        return {"name": name, **await server_ready()}

    @router.get("/v2/models/{name}", dependencies=infer_scope, responses=metadata_errors)
    async def model_metadata(name: Model) -> dict[str, Any]:
        _check_model(service, name)
        return _describe_model(service)

    @router.get("/v2/models/{name}/versions/{version}", dependencies=infer_scope, responses=metadata_errors)
    async def version_metadata(name: Model, version: Version) -> dict[str, Any]:
        _check_model(service, name, version)
        return _describe_model(service)

    Body = Annotated[bytearray, Depends(read_body)]
    JsonLength = Annotated[str | None, Header(alias="Inference-Header-Content-Length")]
    infer_route: dict[str, Any] = {
        "dependencies": infer_scope,
        "responses": error_responses(400, 404, *STREAM_ERRORS),
        "openapi_extra": describe_body("application/json", schema=INFER_REQUEST, examples=_infer_examples(service)),
    }

    @router.post("/v2/models/{name}/infer", **infer_route)
    async def model_infer(
        name: Model, body: Body, json_length: JsonLength = None, key: IdempotencyKey = None
    ) -> Response:
        _check_model(service, name)
        return await _infer(service, body, json_length, key)

    @router.post("/v2/models/{name}/versions/{version}/infer", **infer_route)
    async def version_infer(
        name: Model, version: Version, body: Body, json_length: JsonLength = None, key: IdempotencyKey = None
    ) -> Response:
        _check_model(service, name, version)
        return await _infer(service, body, json_length, key)

    return router


async def _infer(service: Service, body: bytearray, json_length: str | None, key: str | None) -> Response:
    num_bytes = estimate_memory(body, json_length)
    async with service.request_memory.reserve(num_bytes) as shrink_reservation:
        request = await _run_inline_or_in_thread(num_bytes, split_body, body, json_length)
        x = await _run_inline_or_in_thread(num_bytes, parse_input, request)
        if num_bytes >= TRIM_THRESHOLD:
            await asyncio.to_thread(return_freed_memory)
        shrink_reservation(x.nbytes)
        stream, adapt = parse_stream_name(request), request.parameters.get("adapt", True)
        request_id = request.fields.get("id", "")
        if not isinstance(adapt, bool) or not isinstance(request_id, str):
            raise ApiError(400, "the parameter 'adapt' must be true or false, and 'id' must be a string")
        selection = select_outputs(request)
        outputs: dict[str, NDArray[Any]] = {}
        # What cannot be an output is found before the update counts.
        result = await service.infer(
            stream,
            torch.from_numpy(x),
            adapt=adapt,
            check=lambda logits: outputs.update(make_outputs(logits, selection)),
            key=key,
        )
    head: dict[str, Any] = {
        "model_name": service.name,
        "model_version": MODEL_VERSION,
        **({"id": request_id} if request_id else {}),
        "parameters": {
            "sequence_id": stream,
            "adapted": result.adapted,
            "update": result.num_updates,
            **({} if result.ids is None else {"first_id": result.ids[0]}),
            "batch_stats": result.batch_stats,
        },
    }
    num_bytes = sum(values.size * (1 if selection[name] else BYTES_PER_VALUE) for name, values in outputs.items())
    content, length = await _run_inline_or_in_thread(num_bytes, encode_response, head, outputs, selection)
    if length is None:
        return Response(content, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(length)}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _check_model(service: Service, name: str, version: str = MODEL_VERSION) -> None:
    """Raise :class:`ApiError` unless this is the model of a service."""
    if (name, version) != (service.name, MODEL_VERSION):
        raise ApiError(
            404,
            f"there is no model {name!r} of version {version!r}; the only one is {service.name!r} of version "
            f"{MODEL_VERSION!r}",
        )


def _describe_model(service: Service) -> dict[str, Any]:
    """Return the metadata of the model."""
    height, width = service.image_size or (-1, -1)
    num_classes = service.num_classes or -1
    return {
        "name": service.name,
        "versions": [MODEL_VERSION],
        "platform": "ctta_pytorch",
        "inputs": [{"name": INPUT_NAME, "datatype": "FP32", "shape": [-1, service.num_channels, height, width]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, num_classes]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "confidence", "datatype": "FP32", "shape": [-1]},
        ],
    }


async def _run_inline_or_in_thread(num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run work in a thread if it may take long, in which other requests should not have to wait.

    Handing over small work takes longer than doing it.
    """
    return await asyncio.to_thread(work, *arguments) if num_bytes > MAX_INLINE_BYTES else work(*arguments)


def parse_stream_name(request: "InferRequest") -> str:
    """Return the stream, which is the sequence; 0 and the empty string mean none, as in Triton."""
    name = request.parameters.get("sequence_id", "")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ApiError(400, "the parameter 'sequence_id' must be a string or an integer")
    return validate_stream_name(str(name)) if name else DEFAULT_STREAM


def _infer_examples(service: Service) -> dict[str, Any]:
    """Return requests with a gray image; none if the size of images is not known, or too large for JSON."""
    if (
        service.image_size is None
        or service.num_channels * service.image_size[0] * service.image_size[1] > MAX_EXAMPLE_NUMBERS
    ):
        return {}
    shape = [1, service.num_channels, *service.image_size]
    count = shape[1] * shape[2] * shape[3]
    image = {"name": "input", "datatype": "FP32", "shape": shape, "data": [0.5] * count}
    return {
        "adapt": {"summary": "Adapt", "value": {"inputs": [image], "parameters": {"sequence_id": EXAMPLE_STREAM}}},
        "predict": {
            "summary": "Logits without adapting",
            "value": {
                "id": "request 1",
                "inputs": [image],
                "outputs": [{"name": "logits"}],
                "parameters": {"sequence_id": EXAMPLE_STREAM, "adapt": False},
            },
        },
    }
