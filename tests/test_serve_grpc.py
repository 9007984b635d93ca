"""The Open Inference Protocol over gRPC, with the client of Triton: answers, limits and errors are those of HTTP."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from serving import SIZE, TIMEOUT, Client, ServerProcess, make_images, make_tent
from torch import Tensor
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2

import ctta
from ctta.serve import Limits, Service, Tokens
from ctta.serve.grpc_messages import MESSAGES, SERVICE, message_class
from ctta.serve.grpc_server import grpc_server

INFER = f"/{SERVICE}/ModelInfer"
TOKEN, ADMIN = "0123456789abcdef", "fedcba9876543210"
LOGITS = [triton.InferRequestedOutput("logits")]


@contextmanager
def serve_grpc(service: Service, tokens: Tokens = Tokens()) -> Iterator[str]:  # noqa: B008
    """Serve on a free port of this machine in a thread of this process, and yield the address."""
    ready, address = threading.Event(), ""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        nonlocal address
        async with grpc_server(service, tokens, host="127.0.0.1", port=0) as port:
            address = f"127.0.0.1:{port}"
            ready.set()
            await stop.wait()
        await service.store.close()
        service.release()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    try:
        assert ready.wait(TIMEOUT)
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = tmp_path_factory.mktemp("grpc")
    limits = Limits(max_body_bytes=200_000, max_batch=32)
    return Service(ctta.Guarded(make_tent(folder)), folder / "state", image_size=SIZE, window_size=0, limits=limits)


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with serve_grpc(service) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(address) as client:
        yield client


def make_input(x: Tensor, datatype: str = "FP32") -> Any:
    tensor = triton.InferInput("input", list(x.shape), datatype)
    tensor.set_data_from_numpy(x.numpy())
    return tensor


def make_typed_message(x: Tensor, datatype: str, contents: str, **parameters: Any) -> Any:
    message = message_class("ModelInferRequest")(model_name="ctta")
    tensor = message.inputs.add(name="input", datatype=datatype, shape=x.shape)
    getattr(tensor.contents, contents).extend(x.flatten().tolist())
    for name, value in parameters.items():
        kind = {bool: "bool", str: "string"}[type(value)]
        setattr(message.parameters[name], f"{kind}_param", value)
    return message


def call(address: str, message: Any, **options: Any) -> Any:
    """Send a message without any code of a client's library."""
    with grpc.insecure_channel(address) as channel:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return message_class("ModelInferResponse").FromString(channel.unary_unary(INFER)(data, **options))


def assert_fails(send: Callable[[], object], code: grpc.StatusCode, text: str) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as found:
        send()
    assert found.value.code() is code and text in found.value.details(), found.value
    return found.value


def test_messages_are_those_of_the_public_protocol() -> None:
    """Field by field, against the code that was generated for Triton."""

    def describe(descriptor: Any) -> list[tuple[Any, ...]]:
        oneofs = [each.containing_oneof.name if each.containing_oneof else None for each in descriptor.fields]
        fields = [(each.name, each.number, each.type, each.is_repeated) for each in descriptor.fields]
        return list(zip(fields, oneofs, strict=True))

    for name in MESSAGES:
        theirs: Any = service_pb2.DESCRIPTOR.message_types_by_name[name.split(".")[0]]
        for part in name.split(".")[1:]:
            theirs = theirs.nested_types_by_name[part]
        assert describe(message_class(name).DESCRIPTOR) == describe(theirs), name


def test_the_client_of_triton_works(client: Any, service: Service) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("ctta") and client.is_model_ready("ctta", "1")
    assert not client.is_model_ready("resnet") and not client.is_model_ready("ctta", "2")
    assert client.get_server_metadata().version == ctta.__version__
    metadata = client.get_model_metadata("ctta")
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
        ("input", "FP32", [-1, 3, *SIZE])
    ]
    assert [each.name for each in metadata.outputs] == ["logits", "label", "confidence"]
    model = service.factory.template.fork()
    for number in range(3):
        x = make_images(4, number)
        outputs = LOGITS if number else None
        answer = client.infer("ctta", [make_input(x)], outputs=outputs, request_id=f"r{number}", sequence_id="triton")
        expected = model(x)
        if number:
            assert np.array_equal(answer.as_numpy("logits"), expected.numpy())
        else:
            assert np.array_equal(answer.as_numpy("label"), expected.argmax(1).numpy())
            assert answer.as_numpy("confidence").shape == (4,) and answer.as_numpy("logits") is None
        response = answer.get_response()
        assert (response.id, response.model_name) == (f"r{number}", "ctta")
        parameters = response.parameters
        assert parameters["update"].int64_param == number + 1 and parameters["adapted"].bool_param
        assert parameters["sequence_id"].string_param == "triton" and parameters[
            "batch_stats"
        ].double_param == model.batch_fraction(4)
    x = make_images(4, 9)
    only = client.infer("ctta", [make_input(x)], "1", LOGITS, sequence_id="triton", parameters={"adapt": False})
    assert np.array_equal(only.as_numpy("logits"), model.predict(x).numpy())
    assert client.infer("ctta", [make_input(x)], sequence_id=7).get_response().parameters["update"].int64_param == 1
    assert sorted(service.store.slots) == ["7", "triton"]


def test_raw_and_typed_contents_give_the_same_answers(client: Any, address: str) -> None:
    pixels = (255 * make_images(3)).byte()
    options = {"sequence_id": "types", "adapt": False}
    raw = client.infer(
        "ctta", [make_input(pixels / 255)], outputs=LOGITS, sequence_id="types", parameters={"adapt": False}
    )
    expected = raw.as_numpy("logits")
    whole = client.infer("ctta", [make_input(pixels, "UINT8")], outputs=LOGITS, parameters={"adapt": False})
    assert np.array_equal(whole.as_numpy("logits"), expected)
    for x, datatype, contents in (
        (pixels, "UINT8", "uint_contents"),
        (pixels / 255, "FP32", "fp32_contents"),
        ((pixels / 255).double(), "FP64", "fp64_contents"),
    ):
        message = make_typed_message(x, datatype, contents, binary_data_output=False, **options)
        message.outputs.add(name="logits")
        message.outputs.add(name="label")
        answer = call(address, message)
        assert list(answer.outputs[0].shape) == [3, 5] and not answer.raw_output_contents
        assert np.array_equal(np.array(answer.outputs[0].contents.fp32_contents).reshape(3, 5), expected)
        assert list(answer.outputs[1].contents.int64_contents) == expected.argmax(1).tolist()


def test_errors_tell_whose_fault_they_are(address: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    code, x = grpc.StatusCode, make_images(2)

    def typed(x: Tensor = x, datatype: str = "FP32", contents: str = "fp32_contents", **parameters: Any) -> Any:
        return make_typed_message(x, datatype, contents, sequence_id="errors", **parameters)

    other_model, no_input, both, unknown_output = typed(), typed(), typed(), typed()
    other_model.model_name = "resnet"
    no_input.ClearField("inputs")
    both.raw_input_contents.append(x.numpy().tobytes())
    unknown_output.outputs.add(name="x")
    for message, status, text in (
        (other_model, code.NOT_FOUND, "no model 'resnet'"),
        (no_input, code.INVALID_ARGUMENT, "expected one input"),
        (both, code.INVALID_ARGUMENT, "send one of them"),
        (unknown_output, code.INVALID_ARGUMENT, "no output 'x'"),
        (typed(x[:, :2]), code.INVALID_ARGUMENT, "(N, 3, height, width)"),
        (typed(2 * x), code.INVALID_ARGUMENT, "[0, 1]"),
        (typed(x, "FP16"), code.INVALID_ARGUMENT, "raw_input_contents"),
        (typed(x, "FP64"), code.INVALID_ARGUMENT, "fp64_contents, got fp32_contents"),
        (typed((1000 * x).int(), "UINT8", "uint_contents"), code.INVALID_ARGUMENT, "0 to 255"),
        (typed(adapt="no"), code.INVALID_ARGUMENT, "true or false"),
        (typed(make_images(33)), code.RESOURCE_EXHAUSTED, "33 images"),
        (typed(make_images(120)), code.RESOURCE_EXHAUSTED, "larger than max"),
        (b"\xff\xff", code.INVALID_ARGUMENT, "not a ModelInferRequest"),
    ):
        assert_fails(lambda message=message: call(address, message), status, text)  # type: ignore[misc]
    bomb = typed(torch.zeros(400, 3, *SIZE))
    assert_fails(lambda: call(address, bomb, compression=grpc.Compression.Gzip), code.UNIMPLEMENTED, "gzip")
    assert "errors" not in service.store.slots and b"ctta_failures_total{" not in service.metrics.render()
    monkeypatch.setattr(type(service.factory.template), "predict", lambda *_: 1 / 0)
    failure = assert_fails(
        lambda: call(address, typed(make_images(4), adapt=False)), code.INTERNAL, "see the service's log"
    )
    assert "ZeroDivision" not in failure.details() and "errors" not in service.store.slots
    metrics = service.metrics.render().decode()
    assert 'ctta_failures_total{cause="internal"} 1.0' in metrics
    assert f'ctta_requests_total{{method="GRPC",route="{INFER}",status="500"}} 1.0' in metrics


def test_tokens_are_required(tmp_path: Path) -> None:
    service, message = Service(make_tent(tmp_path), tmp_path / "state", window_size=0), make_images(2)
    request = make_typed_message(message, "FP32", "fp32_contents")
    with serve_grpc(service, Tokens(TOKEN, ADMIN)) as address:
        for metadata in ([], [("authorization", f"Bearer {TOKEN}0")], [("authorization", TOKEN)]):
            send = lambda metadata=metadata: call(address, request, metadata=metadata)  # noqa: E731
            assert_fails(send, grpc.StatusCode.UNAUTHENTICATED, "Bearer TOKEN")
        for token in (TOKEN, ADMIN):
            assert call(address, request, metadata=[("authorization", f"Bearer {token}")]).outputs
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_ready() and client.is_model_ready("ctta")
            with pytest.raises(triton.InferenceServerException, match="UNAUTHENTICATED"):
                client.get_model_metadata("ctta")
            assert client.get_model_metadata("ctta", headers={"authorization": f"Bearer {TOKEN}"}).name == "ctta"


def test_tokens_are_checked_before_a_message_is_read(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    sent = threading.Event()

    def send_late() -> Iterator[bytes]:
        assert sent.wait(TIMEOUT)
        yield b""

    with serve_grpc(service, Tokens(TOKEN, ADMIN)) as address, grpc.insecure_channel(address) as channel:
        infer = channel.stream_unary(INFER)
        try:
            assert_fails(lambda: infer(send_late(), timeout=TIMEOUT / 2), grpc.StatusCode.UNAUTHENTICATED, "token")
        finally:
            sent.set()
        metadata = [("authorization", f"Bearer {TOKEN}")]
        none: list[bytes] = []
        assert_fails(
            lambda: infer(iter(none), metadata=metadata), grpc.StatusCode.INVALID_ARGUMENT, "the call has no message"
        )


def test_a_stream_is_the_same_over_http_and_grpc(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "state", "--grpc-port", 0, "--method", "tent", "--window", 0)
    with server as http:
        assert server.process.stdout
        lines = iter(server.process.stdout.readline, "")
        address = next(line for line in lines if line.startswith("Listening on grpc://")).split("//")[1].strip()
        x = make_images(4)
        assert http.infer("both", x)["update"] == 1
        with triton.InferenceServerClient(address) as client:
            answer = client.infer("ctta", [make_input(x)], sequence_id="both")
            assert answer.get_response().parameters["update"].int64_param == 2
        assert Client(http.address).infer("both", x)["update"] == 3
