"""The tensor protocol of the service under hostile bodies: never a 500, a hang, or memory beyond the body's measure."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from fuzz_targets import MAX_BODY, corpus, fuzz_protocol
from hypothesis import given, settings
from hypothesis import strategies as st

BODIES = [path.read_bytes() for path in corpus("protocol")]
#: Bytes that a request may take per byte of the largest body: a number of two characters becomes a Python object, an
#: element of an array of objects, and a float64 and float32 of two more arrays.
MAX_FACTOR = 64
NUMBERS = st.integers(-3, 70_000) | st.sampled_from([2**31 - 1, 2**31, 2**63, 10**30, -1, 1.5, 1e308, True, None])
JSON_VALUES = st.recursive(
    NUMBERS | st.text(max_size=5) | st.sampled_from(["FP32", "UINT8", "FP16", "input", "logits", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SHAPES = st.lists(st.integers(0, 9) | NUMBERS, max_size=9) | st.just([1, 3, 8, 8]) | JSON_VALUES


def nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def requests_of_tensors(draw: st.DrawFn) -> bytes:
    """Return a request that is valid but for some of its parts."""
    datatype = draw(st.sampled_from(["FP32", "FP64", "FP16", "UINT8"]) | JSON_VALUES)
    shape = draw(st.just([1, 3, 8, 8]) | SHAPES)
    tensor: dict[str, Any] = {"name": draw(st.just("input") | JSON_VALUES), "datatype": datatype, "shape": shape}
    data = b""
    if draw(st.booleans()):
        data = np.random.default_rng(draw(st.integers(0, 3))).random(192).astype("<f4").tobytes()
        data = data[: draw(st.just(len(data)) | st.integers(0, len(data)))]
        tensor["parameters"] = draw(
            st.fixed_dictionaries({"binary_data_size": st.just(len(data)) | NUMBERS}) | JSON_VALUES
        )
    else:
        tensor["data"] = draw(st.just([0.5] * 192) | JSON_VALUES | st.integers(0, 60).map(nest))
    fields: dict[str, Any] = {"inputs": draw(st.just([tensor]) | JSON_VALUES)}
    for name in draw(st.lists(st.sampled_from(["outputs", "parameters", "id"]), unique=True)):
        fields[name] = draw(
            JSON_VALUES
            | st.fixed_dictionaries(
                {"sequence_id": st.sampled_from(["a", "b", 7]) | JSON_VALUES, "adapt": st.booleans()}
            )
            | st.just([{"name": "logits", "parameters": {"binary_data": True}}])
        )
    text = json.dumps(fields).encode()
    length = draw(
        st.just(str(len(text)).encode()) | st.sampled_from([b"", b"-1", b"1e3", b"\xb2", b"9" * 30, b"0", b" 5"])
    )
    return length + b"\n" + text + data


@settings(max_examples=250)
@given(request=requests_of_tensors())
def test_requests_that_are_nearly_valid(request: bytes) -> None:
    fuzz_protocol(request)


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_requests(data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from(BODIES)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.integers(start, min(start + 8, len(changed))))
        changed[start:end] = data.draw(
            st.binary(max_size=8) | st.sampled_from([b"[", b"]", b'"', b"{", b"-", b"1e9", b"\x00"])
        )
    fuzz_protocol(bytes(changed))


def long_bodies() -> dict[str, bytes]:
    start = b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": '
    room = MAX_BODY - len(start) - 3
    return {
        "numbers": start + b"[" + b"0," * (room // 2 - 2) + b"0]}]}",
        "lists": start + b"[" + b"[]," * (room // 3 - 2) + b"[]]}]}",
        "nested lists": start + b"[" * (room // 2) + b"]" * (room // 2) + b"}]}",
        "strings": start + b'["' + b"a" * (room // 2) + b'"' + b',""' * (room // 6 - 2) + b"]}]}",
        "objects": start + b"[" + b'{"":0},' * (room // 7 - 2) + b"0]}]}",
        "keys": b"{" + b",".join(b'"%d":0' % number for number in range(MAX_BODY // 9)) + b"}",
        "digits": start + b"9" * (room - 8) + b"}]}",
        "too long": b"[" * (MAX_BODY + 1),
    }


@pytest.mark.parametrize("kind", long_bodies())
def test_memory_is_bounded(kind: str) -> None:
    """The largest bodies of each kind; what Python and numpy allocate is traced."""
    body = b"\n" + long_bodies()[kind]
    fuzz_protocol(body)  # what is allocated only once
    tracemalloc.start()
    try:
        status = fuzz_protocol(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == (413 if kind == "too long" else 400)
    assert peak < MAX_FACTOR * MAX_BODY, f"{peak / MAX_BODY:.0f} bytes per byte"
