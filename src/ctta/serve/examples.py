"""Examples for /openapi.json, which a client can send as they are to the service that describes them."""

from typing import Any

from ctta.serve.service import Service

STREAM = "camera7"
MAX_NUMBERS = 4096  # of an image in JSON; larger ones would make most of the description
#: A small image file, which a service resizes to the size of its images.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAG0lEQVR42mNkYGBQYBDARCwMCgIMDFjQ4JQAAIWuBc54"
    "Zaa9AAAAAElFTkSuQmCC"
)
FEEDBACK: dict[str, Any] = {"labels": {"summary": "Labels of two answers", "value": {"ids": [0, 1], "labels": [0, 1]}}}


def infer_examples(service: Service) -> dict[str, Any]:
    """Return requests with a gray image; none if the size of images is not known, or too large for JSON.

    Args:
        service: What is described.
    """
    if service.image_size is None or service.num_channels * service.image_size[0] * service.image_size[1] > MAX_NUMBERS:
        return {}
    shape = [1, service.num_channels, *service.image_size]
    count = shape[1] * shape[2] * shape[3]
    image = {"name": "input", "datatype": "FP32", "shape": shape, "data": [0.5] * count}
    return {
        "adapt": {"summary": "Adapt", "value": {"inputs": [image], "parameters": {"sequence_id": STREAM}}},
        "predict": {
            "summary": "Logits without adapting",
            "value": {
                "id": "request 1",
                "inputs": [image],
                "outputs": [{"name": "logits"}],
                "parameters": {"sequence_id": STREAM, "adapt": False},
            },
        },
    }


def image_examples(service: Service) -> dict[str, Any]:
    """Return image files by their media type; none if the size of images is not known.

    Args:
        service: What is described.
    """
    return {} if service.image_size is None else {"image/png": {"png": {"summary": "A PNG file", "externalValue": PNG}}}


def path_example(value: str) -> dict[str, Any]:
    """Return the example of a parameter, for ``openapi_examples``.

    Args:
        value: The example.
    """
    return {value: {"value": value}}
