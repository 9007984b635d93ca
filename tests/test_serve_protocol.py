"""The Open Inference Protocol: the client of Triton, malformed bodies, metrics and the OpenAPI description."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import Client, ServerProcess, infer_request, make_images, make_png, make_tent
from tritonclient import http as triton

INFER = "/v2/models/ctta/infer"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = (
        "--method",
        "tent",
        "--no-guard",
        "--window",
        0,
        "--body",
        1,
        "--batch",
        32,
        "--workers",
        2,
        "--streams",
        100_000,
    )
    with ServerProcess(tmp_path_factory.mktemp("protocol") / "state", *options) as client:
        yield client


def test_the_client_of_triton_works(client: Client, tmp_path: Path) -> None:
    model, x = make_tent(tmp_path, batch_stats=0.5), make_images(4).numpy()
    with triton.InferenceServerClient(client.address.removeprefix("http://")) as other:
        assert other.is_server_live() and other.is_server_ready()
        assert other.is_model_ready("ctta") and other.is_model_ready("ctta", "1")
        assert not other.is_model_ready("resnet")
        assert "binary_tensor_data" in other.get_server_metadata()["extensions"]
        metadata = other.get_model_metadata("ctta", "1")
        assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 16, 16]}]
        assert metadata["outputs"][0] == {"name": "logits", "datatype": "FP32", "shape": [-1, 5]}
        for number, binary in enumerate((True, False, True)):
            tensor = triton.InferInput("input", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x, binary_data=binary)
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "label")]
            answer = other.infer(
                "ctta",
                [tensor],
                outputs=wanted if number < 2 else None,
                request_id=f"r{number}",
                sequence_id="triton",
                sequence_start=number == 0,
            )
            expected = model(make_images(4)).numpy()
            if number < 2:
                assert np.array_equal(answer.as_numpy("logits"), expected)
            assert np.array_equal(answer.as_numpy("label"), expected.argmax(1))
            assert answer.get_response()["id"] == f"r{number}"
            names = [output["name"] for output in answer.get_response()["outputs"]]
            assert names == (["logits", "label"] if number < 2 else ["label", "confidence"])
        only = other.infer("ctta", [tensor], "1", wanted, sequence_id="triton", parameters={"adapt": False})
        assert np.array_equal(only.as_numpy("logits"), model.predict(make_images(4)).numpy())
        with pytest.raises(triton.InferenceServerException, match="no input 'pixels'"):
            other.infer("ctta", [triton.InferInput("pixels", [0], "FP32")])
    assert client.json("GET", "/streams/triton")["updates"] == 3


def test_all_datatypes_give_the_same_predictions(client: Client) -> None:
    pixels = (255 * make_images(3)).byte()
    answers = []
    for datatype, values in (("UINT8", pixels), ("FP32", pixels / 255), ("FP64", (pixels / 255).double())):
        data = values.numpy().tobytes()
        tensor = {"name": "input", "datatype": datatype, "shape": list(values.shape)}
        head = json.dumps(
            {
                "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
                "outputs": [{"name": "logits"}],
                "parameters": {"sequence_id": "types", "adapt": False},
            }
        ).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answers.append(client.json("POST", INFER, data=head + data, headers=headers)["outputs"][0]["data"])
    assert answers[0] == answers[1] == answers[2]


def _nest(depth: int) -> Any:
    return [_nest(depth - 1)] if depth else 0.5


def _changed(**changes: Any) -> bytes:
    request = infer_request("malformed", make_images(1))
    request["inputs"][0] |= changes
    return json.dumps(request).encode()


MALFORMED = {
    "nothing": (b"", {}),
    "not JSON": (b"\x89PNG\r\n", {}),
    "a number": (b"1", {}),
    "a deep nest": (b"[" * 200_000, {}),
    "deep data": (_changed(data=0).replace(b'"data": 0', b'"data": ' + b"[" * 5000 + b"]" * 5000), {}),
    **{f"data nested {depth} deep": (_changed(data=_nest(depth)), {}) for depth in (9, 32, 33, 64, 65)},
    "not UTF-8": (b'{"inputs": "\xff"}', {}),
    "NaN": (_changed(data=[float("nan")] * 768), {}),
    "huge numbers": (_changed(data=[1e308] * 768), {}),
    "huge integers": (_changed(data=[10**400] * 768), {}),
    "strings of very different lengths": (_changed(data=["x" * 400_000] + ["y"] * 100_000), {}),
    "strings": (_changed(data=["0.5"] * 768), {}),
    "booleans": (_changed(data=[True] * 768), {}),
    "ragged": (_changed(data=[[1], [1, 2]]), {}),
    "out of range": (_changed(data=[2] * 768), {}),
    "too few": (_changed(data=[0.5]), {}),
    "no data": (_changed(data=None), {}),
    "no images": (_changed(shape=[0, 3, 16, 16], data=[]), {}),
    "negative shape": (_changed(shape=[-1, 3, 16, 16]), {}),
    "overflowing shape": (_changed(shape=[2**31 - 1] * 8, data=[]), {}),
    "a string as shape": (_changed(shape="1,3,16,16"), {}),
    "another rank": (_changed(shape=[768]), {}),
    "another size": (_changed(shape=[1, 3, 8, 32]), {}),
    "other channels": (_changed(shape=[1, 1, 16, 16], data=[0.5] * 256), {}),
    "another type": (_changed(datatype="BYTES"), {}),
    "an object as type": (_changed(datatype={"a": 1}), {}),
    "no parameters": (_changed(parameters=[]), {}),
    "two inputs": (json.dumps({"inputs": infer_request("malformed", make_images(1))["inputs"] * 2}).encode(), {}),
    "a path as stream": (json.dumps(infer_request("../../etc/passwd", make_images(1))).encode(), {}),
    "a negative stream": (json.dumps(infer_request(-1, make_images(1))).encode(), {}),
    "a list as stream": (json.dumps(infer_request([1], make_images(1))).encode(), {}),  # type: ignore[arg-type]
    "a word for adapt": (json.dumps(infer_request("malformed", make_images(1), adapt="no")).encode(), {}),
    "an unknown output": (
        json.dumps({**infer_request("malformed", make_images(1)), "outputs": [{"name": "x"}]}).encode(),
        {},
    ),
    "a number as output": (json.dumps({**infer_request("malformed", make_images(1)), "outputs": [1]}).encode(), {}),
    "an object as id": (json.dumps({**infer_request("malformed", make_images(1)), "id": {}}).encode(), {}),
    "a long header": (b"{}", {"Inference-Header-Content-Length": "100"}),
    "no length": (b"{}", {"Inference-Header-Content-Length": "-1"}),
    "unclaimed bytes": (_changed() + b"1234", {"Inference-Header-Content-Length": str(len(_changed()))}),
    "too many bytes": (
        _changed(parameters={"binary_data_size": 9}) + bytes(9),
        {"Inference-Header-Content-Length": str(len(_changed(parameters={"binary_data_size": 9})))},
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_tensors_are_rejected(client: Client, kind: str) -> None:
    body, headers = MALFORMED[kind]
    response = client.call("POST", INFER, data=body, headers=headers)
    assert response.status_code == 400 and response.json()["error"], response.text
    assert client.call("GET", "/streams/malformed").status_code == 404  # no stream was created


def test_malformed_images_are_rejected(client: Client) -> None:
    bomb = bytearray(make_png())
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)  # the size in its header
    for body in (b"", b"GIF89a", make_png()[:60], b"<svg/>", bytes(bomb)):
        response = client.call("POST", "/streams/malformed/image", data=body)
        assert response.status_code in (400, 413), response.text
    form = client.call("POST", "/streams/malformed/image", files={"file": make_png()})
    assert form.status_code == 400 and "--data-binary" in form.json()["error"] and "0x" not in form.text
    for path in (
        "/streams/%2e%2e/image",
        "/streams/.hidden/image",
        f"/streams/{'a' * 65}/image",
        "/streams/a%0a/image",
    ):
        assert client.call("POST", path, data=make_png()).status_code in (400, 404)


def test_large_requests_are_rejected(client: Client) -> None:
    large = client.call("POST", INFER, data=bytes(2**20 + 1))
    assert large.status_code == 413 and "1048576" in large.json()["error"]
    unannounced = client.call("POST", INFER, data=(bytes(2**18) for _ in range(5)))  # chunked
    assert unannounced.status_code == 413
    assert client.call("POST", INFER, data=_changed(shape=[33, 3, 16, 16], data=[0.5] * 33 * 768)).status_code == 413


def test_unknown_paths_and_methods(client: Client) -> None:
    assert client.call("GET", "/nowhere").json() == {"error": "Not Found"}
    assert client.call("PATCH", "/streams").status_code == 405
    assert client.call("POST", "/v2/models/ctta/versions/2/infer", data=_changed()).status_code == 404
    assert client.call("GET", "/docs").status_code == 404  # of FastAPI, which loads scripts from other servers


def test_metrics_are_prometheus_text_with_bounded_labels(client: Client) -> None:
    for number in range(30):
        client.infer(f"metrics{number}", make_images(2))
        client.call("GET", f"/nowhere/{number}")
    client.json("GET", "/streams")
    families = {family.name: family for family in text_string_to_metric_families(client.call("GET", "/metrics").text)}
    requests = families["ctta_requests"]
    infer = [sample for sample in requests.samples if sample.labels["route"] == "/v2/models/{name}/infer"]
    assert sum(sample.value for sample in infer if sample.labels["status"] == "200") >= 30
    assert sum(len(family.samples) for family in families.values()) < 500
    assert families["ctta_updates"].samples[0].value >= 30
    durations = [
        sample for sample in families["ctta_request_duration_seconds"].samples if sample.labels["route"] == "/streams"
    ]
    counts = [sample.value for sample in durations if "le" in sample.labels]
    assert len(counts) > 5 and counts == sorted(counts)


def test_answers_conform_to_the_openapi_description(client: Client) -> None:
    """Schemathesis generates requests from the OpenAPI description: none may fail, and each answer is as described."""
    schema = schemathesis.openapi.from_url(f"{client.address}/openapi.json")
    few = settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    num_calls = 0
    operations: list[Any] = [result.ok() for result in list[Any](schema.get_all_operations())]
    for operation in operations:

        @few
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            case.call_and_validate(excluded_checks=[positive_data_acceptance])  # not all bytes are an image

        check()
    assert num_calls > 40
