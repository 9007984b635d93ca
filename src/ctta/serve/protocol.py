"""The Open Inference Protocol, version 2, which clients of Triton and KServe speak: what HTTP and gRPC share."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

import ctta
from ctta.serve.errors import ApiError
from ctta.serve.schemas import validate_stream_name
from ctta.serve.service import Service
from ctta.serve.tensors import INPUT_NAME, InferRequest, make_outputs, select_outputs

MODEL_VERSION = "1"
DEFAULT_STREAM = "default"
MAX_INLINE_BYTES = 4 * 2**20  # that are converted within a few milliseconds

T = TypeVar("T")


def check_model(service: Service, name: str, version: str = MODEL_VERSION) -> None:
    """Raise :class:`ApiError` unless this is the model of a service."""
    if (name, version) != (service.name, MODEL_VERSION):
        raise ApiError(
            404,
            f"there is no model {name!r} of version {version!r}; the only one is {service.name!r} of version "
            f"{MODEL_VERSION!r}",
        )


def describe_server() -> dict[str, Any]:
    """Return the metadata of the server."""
    return {"name": "ctta", "version": ctta.__version__, "extensions": ["binary_tensor_data", "sequence"]}


def describe_model(service: Service) -> dict[str, Any]:
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


async def run_inline_or_in_thread(num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run work in a thread if it may take long, in which other requests should not have to wait.

    Handing over small work takes longer than doing it.
    """
    return await asyncio.to_thread(work, *arguments) if num_bytes > MAX_INLINE_BYTES else work(*arguments)


async def answer(
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
