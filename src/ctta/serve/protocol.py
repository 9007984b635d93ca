"""The Open Inference Protocol, version 2, which clients of Triton and KServe speak: the routes below ``/v2``."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from fastapi import APIRouter, Depends, Header, Response
from fastapi import Path as PathParameter
from numpy.typing import NDArray

import ctta
from ctta.serve.auth import Authenticator
from ctta.serve.errors import ApiError
from ctta.serve.examples import infer_examples, path_example
from ctta.serve.limits import LARGE, BodyReader, return_freed_memory
from ctta.serve.schemas import INFER_REQUEST, STREAM_ERRORS, describe_body, error_responses, validate_stream_name
from ctta.serve.service import Service
from ctta.serve.tensors import (
    BYTES_PER_VALUE,
    INPUT_NAME,
    InferRequest,
    encode_response,
    estimate_memory,
    make_outputs,
    parse_input,
    select_outputs,
    split_body,
)

MODEL_VERSION = "1"
DEFAULT_STREAM = "default"
MAX_INLINE_BYTES = 4 * 2**20  # that are converted within a few milliseconds

T = TypeVar("T")


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
        "openapi_extra": describe_body(
            "application/json", schema=INFER_REQUEST, examples={"application/json": infer_examples(service)}
        ),
    }

    @router.post("/v2/models/{name}/infer", **infer_route)
    async def model_infer(name: Model, body: Body, json_length: JsonLength = None) -> Response:
        _check_model(service, name)
        return await _infer(service, body, json_length)

    @router.post("/v2/models/{name}/versions/{version}/infer", **infer_route)
    async def version_infer(name: Model, version: Version, body: Body, json_length: JsonLength = None) -> Response:
        _check_model(service, name, version)
        return await _infer(service, body, json_length)

    return router


async def _infer(service: Service, body: bytearray, json_length: str | None) -> Response:
    num_bytes = estimate_memory(body, json_length)
    async with service.request_memory.reserve(num_bytes) as reservation:
        request = await _run_inline_or_in_thread(num_bytes, split_body, body, json_length)
        x = await _run_inline_or_in_thread(num_bytes, parse_input, request)
        if num_bytes >= LARGE:
            await asyncio.to_thread(return_freed_memory)
        reservation.shrink(x.nbytes)
        head, outputs, selection = await _answer(service, request, x)
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


async def _answer(
    service: Service, request: InferRequest, values: NDArray[Any]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], dict[str, bool]]:
    """Answer a request.

    Args:
        service: What answers it.
        request: The request; its parameters name the stream.
        values: Its images.

    Returns:
        The fields of the answer beside its outputs, the outputs, and whether each was requested as raw bytes.

    Raises:
        ApiError: With the status for the client.
    """
    stream, adapt = parse_stream_name(request), request.parameters.get("adapt", True)
    request_id = request.fields.get("id", "")
    if not isinstance(adapt, bool) or not isinstance(request_id, str):
        raise ApiError(400, "the parameter 'adapt' must be true or false, and 'id' must be a string")
    selection = select_outputs(request)
    outputs: dict[str, NDArray[Any]] = {}
    # What cannot be an output is found before the update counts.
    result = await service.infer(
        stream,
        torch.from_numpy(values),
        adapt=adapt,
        check=lambda logits: outputs.update(make_outputs(logits, selection)),
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
    return head, outputs, selection


def parse_stream_name(request: "InferRequest") -> str:
    """Return the stream, which is the sequence; 0 and the empty string mean none, as in Triton."""
    name = request.parameters.get("sequence_id", "")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ApiError(400, "the parameter 'sequence_id' must be a string or an integer")
    return validate_stream_name(str(name)) if name else DEFAULT_STREAM
