"""Tensors as the Open Inference Protocol writes them: JSON numbers, or raw bytes behind the JSON."""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.serve.errors import Refusal

#: What inputs may be; bytes are pictures' and are divided by 255.
INPUT_TYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "FP16": np.dtype("<f2"),
    "UINT8": np.dtype("u1"),
}
OUTPUT_TYPES: dict[np.dtype[Any], str] = {np.dtype("<f4"): "FP32", np.dtype("<i8"): "INT64"}
_LARGEST_RANK = 8


@dataclass(frozen=True)
class Request:
    """The JSON part of a request, and the bytes behind it."""

    fields: dict[str, Any]
    behind: bytes

    @property
    def parameters(self) -> dict[str, Any]:
        return _parameters(self.fields)


def split_body(body: bytes, header_length: str | None) -> Request:
    """A body by the header ``Inference-Header-Content-Length``, if there is one."""
    length = len(body)
    if header_length is not None:
        is_number = header_length.isascii() and header_length.isdecimal() and len(header_length) < 20
        if not is_number or int(header_length) > len(body):
            raise Refusal(400, f"Inference-Header-Content-Length is not within the {len(body)} bytes of the body")
        length = int(header_length)
    try:
        fields = json.loads(body[:length], parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "the request must be a JSON object with 'inputs'")
    return Request(fields, body[length:])


def read_input(request: Request, name: str) -> NDArray[np.float32]:
    """The one input of the request, as float32."""
    inputs = request.fields.get("inputs")
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        raise Refusal(400, f"'inputs' must be a list of one tensor, {name!r}")
    tensor = inputs[0]
    if tensor.get("name") != name:
        raise Refusal(400, f"the model has no input {tensor.get('name')!r}; its only one is {name!r}")
    kind = tensor.get("datatype")
    if not isinstance(kind, str) or kind not in INPUT_TYPES:
        raise Refusal(400, f"the datatype of {name!r} must be one of {', '.join(INPUT_TYPES)}, got {kind!r}")
    shape = _shape(tensor.get("shape"))
    size = _parameters(tensor).get("binary_data_size")
    values = _values(tensor, kind, shape) if size is None else _from_bytes(request.behind, size, kind, shape)
    if size is None and request.behind:
        raise Refusal(400, "there are bytes behind the JSON that no input claims with binary_data_size")
    with np.errstate(over="ignore"):  # what becomes infinite is refused as such
        floats = values.astype(np.float32)
    return floats / np.float32(255) if kind == "UINT8" else floats


def _shape(shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= _LARGEST_RANK
        or not all(type(length) is int and 0 <= length < 2**31 for length in shape)
    ):
        raise Refusal(400, "'shape' must be a list of whole numbers such as [1, 3, 32, 32]")
    return tuple(shape)


def _values(tensor: dict[str, Any], kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        # As objects first: numpy would give every text the length of the longest, and so take any amount of memory.
        numbers = np.array(tensor.get("data"), dtype=object)
        kinds = set(map(type, numbers.flat))
        if not kinds <= {int, float}:
            raise Refusal(400, "'data' must be a list of numbers, flat or nested")
        values = numbers.astype(np.float64)
    except (ValueError, OverflowError, RecursionError) as error:
        raise Refusal(400, f"'data' is no array of numbers: {error}") from error
    if values.size != prod(shape):
        raise Refusal(400, f"'data' has {values.size} numbers, and the shape {list(shape)} {prod(shape)}")
    if kind == "UINT8" and values.size and not (kinds == {int} and 0 <= values.min() <= values.max() <= 255):
        raise Refusal(400, "'data' of UINT8 must be whole numbers from 0 to 255")
    return values.reshape(shape)


def _from_bytes(behind: bytes, size: Any, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    expected = prod(shape) * INPUT_TYPES[kind].itemsize
    if type(size) is not int or size != expected or len(behind) != expected:
        raise Refusal(
            400,
            f"{kind} of shape {list(shape)} takes {expected} bytes; binary_data_size is {size!r}, "
            f"and {len(behind)} are behind the JSON",
        )
    values: NDArray[Any] = np.frombuffer(behind, INPUT_TYPES[kind]).reshape(shape)
    return values


def write_answer(head: dict[str, Any], outputs: dict[str, NDArray[Any]], request: Request) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON part if bytes follow it.

    The request chooses outputs by name, each as JSON or as bytes; all of them if it names none.
    """
    by_default = _flag(request.parameters, "binary_data_output")
    described, behind = [], bytearray()
    for name, is_binary in _wanted(request.fields.get("outputs"), list(outputs), by_default).items():
        values = outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": OUTPUT_TYPES[values.dtype], "shape": list(values.shape)}
        if is_binary:
            tensor["parameters"] = {"binary_data_size": values.nbytes}
            behind += values.tobytes()
        else:
            tensor["data"] = [
                value if value == value and abs(value) != np.inf else None for value in values.ravel().tolist()
            ]
        described.append(tensor)
    text = json.dumps({**head, "outputs": described}, allow_nan=False).encode()
    return (text + behind, len(text)) if behind else (text, None)


def _wanted(asked: Any, names: list[str], by_default: bool) -> dict[str, bool]:
    """Which outputs, and whether as bytes."""
    if asked is None or asked == []:
        return dict.fromkeys(names, by_default)
    if not (isinstance(asked, list) and all(isinstance(output, dict) for output in asked)):
        raise Refusal(400, "'outputs' must be a list of objects with a name")
    wanted = {}
    for output in asked:
        if not isinstance(output.get("name"), str) or output["name"] not in names:
            raise Refusal(400, f"the model has no output {output.get('name')!r}; it has {', '.join(names)}")
        if "classification" in _parameters(output):
            raise Refusal(400, "classification of outputs is not served: ask for 'label' and 'confidence'")
        wanted[output["name"]] = _flag(_parameters(output), "binary_data", by_default)
    return wanted


def _parameters(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal(400, "'parameters' must be an object")
    return parameters


def _flag(parameters: dict[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise Refusal(400, f"the parameter {name!r} must be true or false, got {value!r}")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")
