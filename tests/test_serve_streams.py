"""Requests to streams: predictions, adaptation, the window of images, and what an operator can do."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from serving import SIZE, make_images, make_png, make_tent, serve_in_thread

import ctta
from ctta.errors import ConfigError
from ctta.io.images import to_unit_floats
from ctta.serve import Limits, Service
from ctta.serve.stream import SampleWindow


def test_requests_predict_and_adapt_like_the_model_itself(tmp_path: Path) -> None:
    model = make_tent(tmp_path)
    with serve_in_thread(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        for step in range(3):
            answer = client.infer("camera", make_images(4, step))
            assert np.array_equal(answer["logits"].astype(np.float32), model(make_images(4, step)).numpy())
            assert answer["adapted"] and answer["update"] == step + 1
        only = client.infer("camera", make_images(4, 9), adapt=False)
        assert np.array_equal(only["logits"].astype(np.float32), model.predict(make_images(4, 9)).numpy())
        assert not only["adapted"] and only["update"] == 3
        assert np.array_equal(only["label"], only["logits"].argmax(1))
        # Another stream is not affected.
        fresh = client.infer(7, make_images(4, 9))
        assert np.array_equal(fresh["logits"].astype(np.float32), model.fork()(make_images(4, 9)).numpy())
        assert [stream["name"] for stream in client.json("GET", "/streams")["streams"]] == ["7", "camera"]


def test_single_images_are_normalized_with_previous_ones(tmp_path: Path) -> None:
    """The source answers first, then the model on the last images, with an update for every three of them."""
    model, source = make_tent(tmp_path, batch_stats=0.5), ctta.Source(make_tent(tmp_path).source)
    service = Service(model, tmp_path / "state", image_size=SIZE, window_size=6, update_every=3)
    files = [make_png(seed) for seed in range(12)]
    pixels = np.stack([np.array(Image.open(io.BytesIO(file))) for file in files])
    x = to_unit_floats(pixels).contiguous()
    with serve_in_thread(service) as client:
        for number, file in enumerate(files):
            answer = client.json("POST", "/streams/a/image?compare=true", data=file)
            batch = x[max(0, number - 5) : number + 1]
            adapts = number in (3, 6, 9)
            predict = source.predict if number < 3 else model if adapts else model.predict
            expected = predict(batch[-1:] if number < 3 else batch)[-1]  # the source answers each image by itself
            confidence, label = expected.double().softmax(0).max(0)
            assert (answer["class"], answer["confidence"]) == (int(label), round(float(confidence), 6))
            assert answer["adapted"] == adapts and (answer["reason"] is None) == adapts
            assert answer["source"]["class"] == int(source.predict(x[number : number + 1]).argmax())
        summary = client.json("GET", "/streams/a")
    assert (summary["updates"], summary["images"], summary["requests"]) == (3, 12, 12)
    assert len(summary["confidences"]) == 12


def test_a_window_keeps_the_newest_images() -> None:
    window = SampleWindow(4, 2)
    for number in range(6):
        window.push(torch.full((1, 1, 1, 1), float(number)), updated=False)
    assert window.make_batch(torch.full((1, 1, 1, 1), 9.0)).flatten().tolist() == [3, 4, 5, 9]
    assert window.make_batch(torch.zeros(5, 1, 1, 1)).shape == (5, 1, 1, 1)
    assert window.make_batch(torch.zeros(1, 1, 2, 2)).shape == (1, 1, 2, 2)  # of another size, so alone


def test_class_names(tmp_path: Path) -> None:
    names = ["bird", "cat", "dog", "frog", "ship"]
    with serve_in_thread(
        Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, class_names=names)
    ) as client:
        answer = client.json("POST", "/streams/a/image", data=make_png(side=40))  # of another size, so resized
        assert answer["label"] == names[answer["class"]]
    with pytest.raises(ConfigError, match="2 class names for a network with 5 classes"):
        Service(make_tent(tmp_path), tmp_path / "other", image_size=SIZE, class_names=["cat", "dog"])


def test_a_single_body_of_the_allowed_size_always_fits(tmp_path: Path) -> None:
    limits = Limits(max_body_bytes=2**20, max_request_bytes=2**21)
    assert limits.max_total_body_bytes == limits.max_decoded_bytes == 2**20
    with pytest.raises(ConfigError, match="max_request_bytes must be at least twice max_body_bytes, 2097152"):
        Limits(max_body_bytes=2**20, max_request_bytes=2**20)
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=limits)) as client:
        assert client.call("PUT", "/streams/a/state", data=bytes(2**12)).status_code == 400  # and not 429


def test_an_exhausted_time_budget_skips_updates_and_reports_it(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, time_budget=1e-9)
    with serve_in_thread(service) as client:
        assert client.infer("a", make_images(4))["adapted"]
        assert not client.infer("a", make_images(4))["adapted"]
        assert not client.infer("a", make_images(4))["adapted"]
        summary = client.json("GET", "/streams/a")
        assert (summary["updates"], summary["images"], summary["skipped"]["budget"]) == (1, 12, 2)
        assert "ctta_updates_over_budget_total 2.0\n" in client.call("GET", "/metrics").text
    events = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["new", "update skipped", "update skipped"]


def test_an_operator_resets_freezes_and_deletes(tmp_path: Path) -> None:
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        first = client.infer("a", make_images(4))
        client.infer("a", make_images(4, 1))
        assert client.json("POST", "/streams/a/freeze")["frozen"]
        assert not client.infer("a", make_images(4))["adapted"]
        assert not client.json("POST", "/streams/a/unfreeze")["frozen"]
        assert client.json("POST", "/streams/a/reset")["updates"] == 0
        assert np.array_equal(client.infer("a", make_images(4))["logits"], first["logits"])
        kinds = [event["kind"] for event in client.json("GET", "/streams/a")["events"]]
        assert kinds == ["new", "freeze", "unfreeze", "reset"]
        client.json("DELETE", "/streams/a")
        assert client.call("GET", "/streams/a").status_code == 404
        assert client.call("POST", "/streams/a/reset").status_code == 404
        assert client.call("POST", "/streams/a/explode").status_code == 400
    assert not list((tmp_path / "state/streams").iterdir())


def test_download_and_upload_of_a_state(tmp_path: Path) -> None:
    model = make_tent(tmp_path)
    with serve_in_thread(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        model(make_images(4)), client.infer("a", make_images(4))
        file = tmp_path / "a.safetensors"
        file.write_bytes(client.state("a"))
        loaded = ctta.load(file, make_tent(tmp_path).copy_of_source())
        assert torch.equal(loaded(make_images(4, 1)), model.fork().predict(make_images(4, 1))) is False
        assert client.json("PUT", "/streams/b/state", data=file.read_bytes())["updates"] == 1
        assert np.array_equal(
            client.infer("b", make_images(4, 1))["logits"].astype(np.float32), model(make_images(4, 1)).numpy()
        )
        other = tmp_path / "other.safetensors"
        ctta.save(ctta.BNStats(make_tent(tmp_path).copy_of_source()), other)
        blended = tmp_path / "blended.safetensors"
        ctta.save(make_tent(tmp_path, batch_stats=0.5), blended)
        for body in (b"", b"nonsense", file.read_bytes()[:-5], other.read_bytes(), blended.read_bytes()):
            rejected = client.call("PUT", "/streams/c/state", data=body)
            assert rejected.status_code == 400 and str(tmp_path) not in rejected.text
        assert client.call("GET", "/streams/c").status_code == 404


def test_upload_of_weights_that_are_not_finite_is_rejected(tmp_path: Path) -> None:
    model, file = make_tent(tmp_path), tmp_path / "a.safetensors"
    with torch.no_grad():
        next(model.student.parameters()).fill_(torch.nan)
    ctta.save(model, file)
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE)) as client:
        rejected = client.call("PUT", "/streams/a/state", data=file.read_bytes())
    assert rejected.status_code == 400 and "not finite" in rejected.json()["error"]


def test_metrics_name_the_streams_of_guarded_models(tmp_path: Path) -> None:
    model = ctta.Guarded(make_tent(tmp_path))
    with serve_in_thread(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        for name in ("dock", "gate"):
            client.infer(name, make_images(4))
        lines = client.call("GET", "/metrics").text.splitlines()
        health = client.json("GET", "/streams/gate")["health"]
    assert f'ctta_stream_confidence{{stream="gate"}} {health["confidence"]}' in lines
    assert 'ctta_stream_collapse_score{stream="dock"} 0.0' in lines
