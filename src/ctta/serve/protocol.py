"""The Open Inference Protocol, version 2: what clients of Triton and KServe speak."""

import asyncio
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import APIRouter, Depends, Header, Response
from numpy.typing import NDArray
from torch import Tensor

import ctta
from ctta.serve.auth import Door
from ctta.serve.bodies import Bodies
from ctta.serve.errors import Refusal
from ctta.serve.names import DEFAULT, checked_name
from ctta.serve.schemas import INFER_REQUEST, body_of, problems
from ctta.serve.service import Service
from ctta.serve.tensors import Request, read_input, split_body, write_answer

VERSION = "1"
INPUT = "input"


def protocol_routes(service: Service, door: Door, bodies: Bodies) -> APIRouter:
    """``/v2`` and what is below it."""
    router = APIRouter(tags=["Open Inference Protocol"])
    anyone, reader = [Depends(door.anyone)], [Depends(door.infer)]
    refused = problems(400, 404)

    def check_model(name: str, version: str = VERSION) -> None:
        if (name, version) != (service.name, VERSION):
            raise Refusal(404, f"there is no model {name!r} of version {version!r}, only {service.name!r}, {VERSION}")

    @router.get("/v2", dependencies=reader, responses=refused)
    async def server() -> dict[str, Any]:
        return {"name": "ctta", "version": ctta.__version__, "extensions": ["binary_tensor_data", "sequence"]}

    @router.get("/v2/health/live", dependencies=anyone, responses=problems())
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", dependencies=anyone, responses=problems(503))
    async def ready() -> dict[str, bool]:
        if service.store.is_closed:
            raise Refusal(503, "the service is stopping", retry_after=5)
        return {"ready": True}

    @router.get("/v2/models/{name}/ready", dependencies=anyone, responses=problems(404, 503))
    async def model_ready(name: str) -> dict[str, Any]:
        check_model(name)
        return {"name": name, **await ready()}

    @router.get("/v2/models/{name}/versions/{version}/ready", dependencies=anyone, responses=problems(404, 503))
    async def version_ready(name: str, version: str) -> dict[str, Any]:
        check_model(name, version)
        return {"name": name, **await ready()}

    @router.get("/v2/models/{name}", dependencies=reader, responses=refused)
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return _metadata(service)

    @router.get("/v2/models/{name}/versions/{version}", dependencies=reader, responses=refused)
    async def model_version(name: str, version: str) -> dict[str, Any]:
        check_model(name, version)
        return _metadata(service)

    Body = Annotated[bytes, Depends(bodies)]
    HeaderLength = Annotated[str | None, Header(alias="Inference-Header-Content-Length")]
    described: dict[str, Any] = {
        "dependencies": reader,
        "responses": problems(400, 404, 408, 409, 413, 415, 429, 503, 504),
        "openapi_extra": body_of("application/json", schema=INFER_REQUEST),
    }

    @router.post("/v2/models/{name}/infer", **described)
    async def infer(name: str, body: Body, header_length: HeaderLength = None) -> Response:
        check_model(name)
        return await _infer(service, body, header_length)

    @router.post("/v2/models/{name}/versions/{version}/infer", **described)
    async def version_infer(name: str, version: str, body: Body, header_length: HeaderLength = None) -> Response:
        check_model(name, version)
        return await _infer(service, body, header_length)

    return router


def _metadata(service: Service) -> dict[str, Any]:
    height, width = service.size or (-1, -1)
    num_classes = service.num_classes or -1
    return {
        "name": service.name,
        "versions": [VERSION],
        "platform": "ctta_pytorch",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, service.num_channels, height, width]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, num_classes]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "confidence", "datatype": "FP32", "shape": [-1]},
        ],
    }


async def _infer(service: Service, body: bytes, header_length: str | None) -> Response:
    # Large bodies take a while to read, in which others should not have to wait.
    request, x = await asyncio.to_thread(_read, body, header_length)
    stream, adapt = _stream_of(request), request.parameters.get("adapt", True)
    identity = request.fields.get("id", "")
    if not isinstance(adapt, bool) or not isinstance(identity, str):
        raise Refusal(400, "the parameter 'adapt' must be true or false, and 'id' a text")
    write_answer({}, _outputs(torch.zeros(1, 1)), request)  # to refuse what is asked for before anything changes
    answer = await service.infer(stream, x, adapt=adapt)
    head: dict[str, Any] = {
        "model_name": service.name,
        "model_version": VERSION,
        **({"id": identity} if identity else {}),
        "parameters": {"sequence_id": stream, "adapted": answer.adapted, "update": answer.num_updates},
    }
    content, length = await asyncio.to_thread(write_answer, head, _outputs(answer.logits), request)
    if length is None:
        return Response(content, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(length)}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _read(body: bytes, header_length: str | None) -> tuple[Request, Tensor]:
    request = split_body(body, header_length)
    return request, torch.from_numpy(read_input(request, INPUT))


def _stream_of(request: Request) -> str:
    """The stream is the sequence; 0 and the empty text stand for none, as in Triton."""
    name = request.parameters.get("sequence_id", "")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise Refusal(400, "the parameter 'sequence_id' must be a text or a whole number")
    return checked_name(str(name)) if name else DEFAULT


def _outputs(logits: Tensor) -> dict[str, NDArray[Any]]:
    confidence, label = logits.double().softmax(1).max(1)
    tensors = {"logits": logits.float(), "label": label, "confidence": confidence.float()}
    return {name: np.ascontiguousarray(value.cpu().numpy()) for name, value in tensors.items()}
