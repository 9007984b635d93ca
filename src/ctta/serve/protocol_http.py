"""The Open Inference Protocol over HTTP: the routes below ``/v2``."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Response
from fastapi import Path as PathParameter

from ctta.serve.auth import Authenticator
from ctta.serve.examples import infer_examples, path_example
from ctta.serve.limits import LARGE, BodyReader, return_freed_memory
from ctta.serve.protocol import (
    MODEL_VERSION,
    answer,
    check_model,
    describe_model,
    describe_server,
    run_inline_or_in_thread,
)
from ctta.serve.schemas import INFER_REQUEST, STREAM_ERRORS, describe_body, error_responses
from ctta.serve.service import Service
from ctta.serve.tensors import BYTES_PER_VALUE, encode_response, estimate_memory, parse_input, split_body


def protocol_routes(service: Service, auth: Authenticator, read_body: BodyReader) -> APIRouter:
    """Return the routes below ``/v2``."""
    router = APIRouter(tags=["Open Inference Protocol"])
    public, infer_scope = [Depends(auth.allow_anyone)], [Depends(auth.require_infer)]
    Model = Annotated[str, PathParameter(openapi_examples=path_example(service.name))]
    Version = Annotated[str, PathParameter(openapi_examples=path_example(MODEL_VERSION))]
    metadata_errors, ready_errors = error_responses(400, 404), error_responses(404, 503)

    @router.get("/v2", dependencies=infer_scope, responses=metadata_errors)
    async def server_metadata() -> dict[str, Any]:
        return describe_server()

    @router.get("/v2/health/live", dependencies=public, responses=error_responses())
    async def server_live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", dependencies=public, responses=error_responses(503))
    async def server_ready() -> dict[str, bool]:
        service.check_ready()
        return {"ready": True}

    @router.get("/v2/models/{name}/ready", dependencies=public, responses=ready_errors)
    async def model_ready(name: Model) -> dict[str, Any]:
        check_model(service, name)
        return {"name": name, **await server_ready()}

    @router.get("/v2/models/{name}/versions/{version}/ready", dependencies=public, responses=ready_errors)
    async def version_ready(name: Model, version: Version) -> dict[str, Any]:
        check_model(service, name, version)
        return {"name": name, **await server_ready()}

    @router.get("/v2/models/{name}", dependencies=infer_scope, responses=metadata_errors)
    async def model_metadata(name: Model) -> dict[str, Any]:
        check_model(service, name)
        return describe_model(service)

    @router.get("/v2/models/{name}/versions/{version}", dependencies=infer_scope, responses=metadata_errors)
    async def version_metadata(name: Model, version: Version) -> dict[str, Any]:
        check_model(service, name, version)
        return describe_model(service)

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
        check_model(service, name)
        return await _infer(service, body, json_length)

    @router.post("/v2/models/{name}/versions/{version}/infer", **infer_route)
    async def version_infer(name: Model, version: Version, body: Body, json_length: JsonLength = None) -> Response:
        check_model(service, name, version)
        return await _infer(service, body, json_length)

    return router


async def _infer(service: Service, body: bytearray, json_length: str | None) -> Response:
    num_bytes = estimate_memory(body, json_length)
    async with service.request_memory.reserve(num_bytes) as reservation:
        request = await run_inline_or_in_thread(num_bytes, split_body, body, json_length)
        x = await run_inline_or_in_thread(num_bytes, parse_input, request)
        if num_bytes >= LARGE:
            await asyncio.to_thread(return_freed_memory)
        reservation.shrink(x.nbytes)
        head, outputs, selection = await answer(service, request, x)
    num_bytes = sum(values.size * (1 if selection[name] else BYTES_PER_VALUE) for name, values in outputs.items())
    content, length = await run_inline_or_in_thread(num_bytes, encode_response, head, outputs, selection)
    if length is None:
        return Response(content, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(length)}
    return Response(content, media_type="application/octet-stream", headers=headers)
