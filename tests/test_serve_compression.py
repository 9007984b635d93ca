"""Compressed bodies: the same answers, limits on what they expand to, and damage that is the client's fault."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from serving import SIZE, Client, infer_request, make_images, make_png, make_tent, serve_in_thread
from tritonclient import http as triton

from ctta.serve import Limits, Service

INFER, MAX_BODY = "/v2/models/ctta/infer", 400_000


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder, limits = tmp_path_factory.mktemp("compression"), Limits(max_body_bytes=MAX_BODY)
    service = Service(make_tent(folder), folder / "state", image_size=SIZE, window_size=0, limits=limits)
    with serve_in_thread(service) as client:
        yield client


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_the_client_of_triton_may_compress(client: Client, encoding: str) -> None:
    x = make_images(4)
    expected = client.infer("plain", x, adapt=False)
    with triton.InferenceServerClient(client.address.removeprefix("http://")) as other:
        tensor = triton.InferInput("input", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x.numpy())
        logits = [triton.InferRequestedOutput("logits")]
        answer = other.infer(
            "ctta", [tensor], outputs=logits, parameters={"adapt": False}, request_compression_algorithm=encoding
        )
        assert np.array_equal(answer.as_numpy("logits"), expected["logits"].astype(np.float32))


def test_image_files_and_several_members(client: Client) -> None:
    png = make_png()
    plain = client.json("POST", "/streams/plain/image?adapt=false", data=png)
    for body in (gzip.compress(png), gzip.compress(png[:100]) + gzip.compress(png[100:])):
        answer = client.json(
            "POST", "/streams/plain/image?adapt=false", data=body, headers={"Content-Encoding": "GZIP"}
        )
        assert answer == plain


BODY = json.dumps(infer_request("bad", make_images(1))).encode()
BAD = {
    "a bomb": ("gzip", gzip.compress(bytes(20_000_000)), 413),
    "a bomb of zlib": ("deflate", zlib.compress(bytes(20_000_000)), 413),
    "one byte too large": ("gzip", gzip.compress(BODY + b" " * (MAX_BODY - len(BODY) + 1)), 413),
    "nothing, many times": ("gzip", gzip.compress(b"") * (MAX_BODY // 20 + 1), 413),
    "truncated": ("gzip", gzip.compress(BODY)[:-1], 400),
    "damaged": ("gzip", gzip.compress(BODY)[:-8] + bytes(8), 400),
    "not compressed": ("gzip", BODY, 400),
    "empty": ("deflate", b"", 400),
    "bytes after the end": ("deflate", zlib.compress(BODY) + b"x", 400),
    "unknown": ("br", BODY, 415),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
}


@pytest.mark.parametrize("name", BAD)
def test_bodies_that_are_refused(client: Client, name: str) -> None:
    encoding, body, status = BAD[name]
    headers = {"Content-Encoding": encoding}
    parts = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    for data in (body, iter(parts)):  # with a length, and in chunks
        tracemalloc.start()
        response = client.call("POST", INFER, data=data, headers=headers)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert response.status_code == status and response.json()["error"], response.text
        assert peak < 6_000_000  # a piece beside the body, whatever it would expand to
    assert "bad" not in [stream["name"] for stream in client.json("GET", "/streams")["streams"]]


def test_a_body_of_the_largest_size_is_served(client: Client) -> None:
    body = gzip.compress(BODY + b" " * (MAX_BODY - len(BODY)))
    assert client.json("POST", INFER, data=body, headers={"Content-Encoding": "gzip"})["outputs"]
