"""Errors tell whose fault they are: bad requests get 4xx, failures inside a network 5xx, and nothing changes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse_safetensors
from serving import SIZE, Client, make_images, make_png, make_tent, serve_in_thread
from torch import Tensor, nn

import ctta
from ctta.serve import Service

SECRET = "weights at /srv/secret"
STREAMS = ("undisturbed", "disturbed")


def allocate_too_much() -> None:
    """Fail as torch does on the CPU, with a plain RuntimeError."""
    torch.empty(2**62, dtype=torch.uint8)


def raise_error(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FAULTS: dict[str, tuple[Callable[[], object], str]] = {  # and the cause that the metrics count
    "shape mismatch": (lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), "internal"),
    "runtime error": (raise_error(RuntimeError(SECRET)), "internal"),
    "value error": (raise_error(ValueError(SECRET)), "internal"),
    "type error": (raise_error(TypeError(SECRET)), "internal"),
    "index error": (raise_error(IndexError(SECRET)), "internal"),
    "assertion": (raise_error(AssertionError(SECRET)), "internal"),
    "disk error": (raise_error(OSError(SECRET)), "internal"),
    "out of memory in Python": (raise_error(MemoryError(SECRET)), "out_of_memory"),
    "out of memory on a GPU": (raise_error(torch.OutOfMemoryError(SECRET)), "out_of_memory"),
    "out of memory as text": (raise_error(RuntimeError(f"MPS backend out of memory: {SECRET}")), "out_of_memory"),
    "out of memory on the CPU": (allocate_too_much, "out_of_memory"),
}
_fault: Callable[[], object] | None = None  # what the models below do now


@contextmanager
def failing(fault: str | Callable[[], object]) -> Iterator[None]:
    global _fault
    _fault = FAULTS[fault][0] if isinstance(fault, str) else fault
    try:
        yield
    finally:
        _fault = None


class FaultyNetwork(nn.Module):
    """Fail in the forward pass, on request."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if _fault is not None:
            _fault()
        logits: Tensor = self.net(x)
        return logits


class FailAfterStep(ctta.Tent):
    """Fail on request once weights, optimizer and counters have changed."""

    def adapt_step(self, x: Tensor) -> Tensor:
        logits = super().adapt_step(x)
        self.num_skipped += _fault is not None
        if _fault is not None:
            _fault()
        return logits


def in_forward(folder: Path) -> ctta.AdaptiveModel:
    return ctta.Tent(FaultyNetwork(make_tent(folder).copy_of_source()))


def after_step(folder: Path) -> ctta.AdaptiveModel:
    return FailAfterStep(make_tent(folder).copy_of_source())


def after_step_guarded(folder: Path) -> ctta.AdaptiveModel:
    return ctta.Guarded(after_step(folder), snapshot_every=1, inspect_every=1)


def in_forward_of_cotta(folder: Path) -> ctta.AdaptiveModel:
    net = FaultyNetwork(make_tent(folder).copy_of_source())
    return ctta.Guarded(ctta.CoTTA(net, views=ctta.views.image_views(2), restore=0.1))


def comparable(client: Client, stream: str) -> dict[str, Any]:
    """Return what a stream shows of itself, without times."""
    summary = client.json("GET", f"/streams/{stream}")
    del summary["used_at"]
    summary["events"] = [{**event, "time": None} for event in summary["events"]]
    return dict(summary)


def assert_same_streams(client: Client) -> None:
    """Check that two streams look the same, answer the same from now on, and end in the same state."""
    one, other = (comparable(client, stream) for stream in STREAMS)
    assert one == {**other, "name": one["name"]}
    for step in range(3):
        one, other = (client.infer(stream, make_images(3, 100 + step)) for stream in STREAMS)
        assert np.array_equal(one["logits"], other["logits"]) and one["update"] == other["update"]
    before, after = (parse_safetensors(client.state(stream)) for stream in STREAMS)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def assert_withheld(response: Any, cause: str = "internal") -> None:
    assert response.status_code == 500, response.text
    assert SECRET not in response.text and "alloc" not in response.text and "2x3" not in response.text
    assert ("Retry-After" in response.headers) == (cause == "out_of_memory")


CASES = [
    *((after_step_guarded, fault) for fault in FAULTS),
    *((model, fault) for model in (in_forward, after_step, in_forward_of_cotta) for fault in list(FAULTS)[::10]),
]


@pytest.mark.parametrize(("model", "fault"), CASES)
def test_a_failed_request_leaves_the_stream_as_it_was(
    tmp_path: Path, model: Callable[[Path], ctta.AdaptiveModel], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two streams get the same images, one of them a failing request in between."""
    cause = FAULTS[fault][1]
    service = Service(model(tmp_path), tmp_path / "state", image_size=SIZE, window_size=6, update_every=1)
    with serve_in_thread(service) as client:
        for step in range(3):
            for stream in STREAMS:
                client.infer(stream, make_images(4, step))
        slot = service.store.slots["disturbed"]
        assert slot.stream and slot.stream.num_updates == 3
        num_changes = slot.stream.num_changes
        with failing(fault), caplog.at_level(logging.ERROR, "ctta.serve"):
            assert_withheld(client.call("POST", "/streams/disturbed/image", data=make_png()), cause)
        (record,) = [record for record in caplog.records if record.name == "ctta.serve"]
        assert "disturbed" in record.getMessage() and record.exc_info and record.exc_info[2]
        assert slot.stream.num_changes == num_changes
        metrics = client.call("GET", "/metrics").text
        assert f'ctta_failures_total{{cause="{cause}"}} 1.0\n' in metrics
        assert 'route="/streams/{name}/image",status="500"' in metrics
        assert_same_streams(client)


@pytest.mark.parametrize("fault", ["value error", "out of memory on the CPU"])
def test_a_failed_prediction_changes_nothing(tmp_path: Path, fault: str) -> None:
    with serve_in_thread(Service(in_forward(tmp_path), tmp_path / "state", image_size=SIZE)) as client:
        for stream in STREAMS:
            client.infer(stream, make_images(8))
        with failing(fault):
            for query in ("?adapt=false", "?compare=true"):
                response = client.call("POST", f"/streams/disturbed/image{query}", data=make_png())
                assert_withheld(response, FAULTS[fault][1])
        assert_same_streams(client)


def test_an_error_while_an_event_is_recorded_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third batch resets the model, which is an event."""
    service = Service(ctta.Guarded(make_tent(tmp_path), reset_every=3), tmp_path / "state", window_size=0)
    with serve_in_thread(service) as client:
        for step in range(2):
            for stream in STREAMS:
                client.infer(stream, make_images(4, step))

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(SECRET)

        with monkeypatch.context() as patched:
            patched.setattr(service.factory.log, "append", fail)
            assert_withheld(client.call("POST", "/streams/disturbed/image", data=make_png()))
        assert_same_streams(client)


def test_a_failed_request_creates_no_stream(tmp_path: Path) -> None:
    model = in_forward(tmp_path)
    service = Service(model, tmp_path / "state", image_size=SIZE, window_size=0)
    with serve_in_thread(service) as client:
        with failing("runtime error"):
            assert_withheld(client.call("POST", "/streams/a/image", data=make_png()))
        assert client.call("GET", "/streams/a").status_code == 404
        assert client.json("GET", "/streams")["total"] == service.store.num_live == 0
        assert np.array_equal(
            client.infer("a", make_images(4))["logits"].astype(np.float32), model(make_images(4)).numpy()
        )


@pytest.mark.parametrize("guarded", [False, True])
def test_images_of_a_size_that_the_network_cannot_take(tmp_path: Path, guarded: bool) -> None:
    """A declared size is checked by the service; without one, the network fails, until a size is known that works."""

    def build() -> ctta.AdaptiveModel:
        return ctta.Guarded(make_tent(tmp_path)) if guarded else make_tent(tmp_path)

    with serve_in_thread(Service(build(), tmp_path / "declared", image_size=SIZE)) as client:
        rejected = client.call("POST", "/v2/models/ctta/infer", json=request_of_size(9))
        assert rejected.status_code == 400 and "[16, 16]" in rejected.json()["error"]
    with serve_in_thread(Service(build(), tmp_path / "any")) as client:
        for side, status in ((9, 500), (3000, 413)):
            response = client.call("POST", "/v2/models/ctta/infer", json=request_of_size(side))
            assert response.status_code == status and "mat1" not in response.text
        assert client.infer("b", make_images(4))["logits"].shape == (4, 5)
        assert_size_rejected(client)
        assert client.call("GET", "/streams/a").status_code == 404
        metrics = client.call("GET", "/metrics").text
        assert 'ctta_failures_total{cause="internal"} 1.0\n' in metrics  # of the first request, when no size was known
    with serve_in_thread(Service(build(), tmp_path / "any")) as client:  # knows the size of the stored stream
        assert_size_rejected(client)


def assert_size_rejected(client: Client) -> None:
    """Send images of a size that the network cannot take, in every way."""
    for response in (
        client.call("POST", "/v2/models/ctta/infer", json=request_of_size(9)),
        client.call("POST", "/streams/a/image", data=make_png(side=9)),
        client.call("POST", "/streams/a/image?compare=true", data=make_png(side=9)),
    ):
        assert response.status_code == 400, response.text
        assert "no images of [9, 9] pixels" in response.json()["error"] and "[16, 16]" in response.json()["error"]


def test_a_network_that_fails_on_any_size_is_not_the_clients_fault(tmp_path: Path) -> None:
    """Nor one that fails once: the size explains a failure only if it is the difference."""
    faults = iter([raise_error(RuntimeError(SECRET))])
    with serve_in_thread(Service(in_forward(tmp_path), tmp_path / "state", window_size=0)) as client:
        client.infer("a", make_images(4))
        before = comparable(client, "a")
        with failing("assertion"):
            assert_withheld(client.call("POST", "/v2/models/ctta/infer", json=request_of_size(9)))
        with failing(lambda: next(faults, int)()):
            assert_withheld(client.call("POST", "/v2/models/ctta/infer", json=request_of_size(15)))
        assert comparable(client, "a") == before


def request_of_size(side: int) -> dict[str, Any]:
    shape = [4, 3, side, side] if side < 100 else [1, 3, 1, side]
    tensor = {"name": "input", "datatype": "FP32", "shape": shape, "data": [0.5] * int(np.prod(shape))}
    return {"inputs": [tensor], "parameters": {"sequence_id": "a"}}


def test_input_that_a_guard_rejects_is_the_clients_fault(tmp_path: Path) -> None:
    """A guard learns the size from the first batch; the rejection is recorded, and changes nothing else."""
    service = Service(ctta.Guarded(make_tent(tmp_path)), tmp_path / "state", window_size=0)
    with serve_in_thread(service) as client:
        client.infer("a", make_images(4))
        before = comparable(client, "a")
        response = client.call("POST", "/v2/models/ctta/infer", json=request_of_size(9))
        assert response.status_code == 400 and response.json()["error"]
        after = comparable(client, "a")
        assert [event["kind"] for event in after.pop("events")][-1] == "refusal"
        before.pop("events")
        assert after == before
        assert "ctta_failures_total{" not in client.call("GET", "/metrics").text


def test_an_image_for_a_network_that_predicts_no_single_class(tmp_path: Path) -> None:
    """The request is rejected, and has not changed the stream."""
    model = ctta.Tent(nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)))
    with serve_in_thread(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        client.infer("a", make_images(4))
        before = comparable(client, "a")
        response = client.call("POST", "/streams/a/image", data=make_png())
        assert response.status_code == 400 and "not one class" in response.json()["error"]
        assert comparable(client, "a") == before
