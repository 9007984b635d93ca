"""Tensors of the Open Inference Protocol: requests in, arrays and their names out.

A tensor is a list of JSON numbers, or raw bytes that follow the JSON part of a body; then the header
``Inference-Header-Content-Length`` holds the length of the JSON part.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.serve.errors import ApiError

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


# ---- tensors of requests ----


@dataclass(frozen=True)
class InferRequest:
    """A request in two parts.

    Attributes:
        fields: The JSON part.
        data: The bytes that follow it.
    """

    fields: dict[str, Any]
    data: memoryview

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
    """Return some of the outputs as contiguous arrays."""
    tensors = {"logits": logits.float()}
    tensors["confidence"], tensors["label"] = logits.double().softmax(1).max(1)
    tensors["confidence"] = tensors["confidence"].float()
    return {name: np.ascontiguousarray(tensors[name].cpu().numpy()) for name in names}


def encode_response(
    head: dict[str, Any], outputs: dict[str, NDArray[Any]], selection: dict[str, bool]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON part if bytes follow it.

    Args:
        head: Fields of the response beside its outputs.
        outputs: Arrays by name.
        selection: Whether each output is sent as bytes.
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
