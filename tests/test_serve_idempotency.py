"""Requests with an idempotency key count once, however often they are sent, also after a restart and on a cluster."""

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import local_shards, make_batch
from serving import Client, ServerProcess, infer_request, make_images, make_png, make_tent, serve_in_thread

from ctta.io.tensors import read_tensors, write_tensors
from ctta.serve import Service
from ctta.serve.stream import MAX_KEYED_BYTES, MAX_KEYS, InferenceResult, KeyedResults


def send(client: Client, key: str, number: int = 0, **parameters: Any) -> Any:
    request = infer_request("a", make_images(4, number), **parameters)
    return client.call("POST", "/v2/models/ctta/infer", json=request, headers={"Idempotency-Key": key})


def build(folder: Path, **options: Any) -> Service:
    return Service(make_tent(folder), folder / "state", **{"window_size": 0, "num_workers": 1} | options)


def test_a_request_that_is_sent_again_is_answered_as_before_and_teaches_once(tmp_path: Path) -> None:
    with serve_in_thread(build(tmp_path, num_answers=100)) as client:
        first = send(client, "one")
        assert first.json()["parameters"]["update"] == 1
        assert send(client, "two", 1).json()["parameters"]["update"] == 2
        assert send(client, "one").json() == first.json()
        assert client.json("GET", "/streams/a")["updates"] == 2
        assert client.json("GET", "/streams/a")["images"] == 8
        metrics = client.call("GET", "/metrics").text
        assert 'ctta_images_total{mode="adapted"} 8.0\n' in metrics and "ctta_updates_total 2.0\n" in metrics
        response = send(client, "one", 5)
        assert response.status_code == 409 and "used for other images" in response.json()["error"]
        for key in ("", "a b", "x" * 256):
            assert send(client, key).status_code == 400
        headers = {"Idempotency-Key": "image"}
        images = [client.json("POST", "/streams/b/image", data=make_png(), headers=headers) for _ in range(3)]
        assert images[0] == images[1] == images[2] and client.json("GET", "/streams/b")["updates"] == 1


def test_a_prediction_ignores_the_key(tmp_path: Path) -> None:
    with serve_in_thread(build(tmp_path)) as client:
        first = send(client, "one").json()
        prediction = send(client, "one", adapt=False).json()
        assert not prediction["parameters"]["adapted"] and prediction["outputs"] != first["outputs"]
        assert send(client, "other", adapt=False).status_code == 200
        assert send(client, "other").json()["parameters"]["update"] == 2


def test_a_request_that_failed_can_be_sent_again(tmp_path: Path) -> None:
    with serve_in_thread(build(tmp_path)) as client:
        request = infer_request("a", make_images(4) * 3)
        headers = {"Idempotency-Key": "one"}
        assert client.call("POST", "/v2/models/ctta/infer", json=request, headers=headers).status_code == 400
        assert send(client, "one").json()["parameters"]["update"] == 1


def test_keys_are_kept_with_the_snapshots_of_a_stream(tmp_path: Path) -> None:
    """A stream that leaves memory, a stop, and a kill, after which the key is there if its update is."""
    options = ("--method", "tent", "--no-guard", "--window", 0, "--workers", 1, "--live-streams", 1)
    server = ServerProcess(tmp_path / "state", *options, "--snapshot-every", 3600)
    with server as client:
        first = send(client, "one").json()
        client.infer("b", make_images(4))
        assert send(client, "one").json() == first
        assert server.stop(signal.SIGTERM) == 0
    with server as client:
        assert send(client, "one").json() == first
        assert send(client, "two", 1).json()["parameters"]["update"] == 2
        server.stop(signal.SIGKILL)
    with server as client:
        assert send(client, "one").json() == first
        assert send(client, "two", 1).json()["parameters"]["update"] == 2, "neither the update nor its key was saved"


def test_keys_and_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = build(tmp_path)
    with serve_in_thread(service) as client:
        for number in range(MAX_KEYS + 1):
            assert send(client, f"key{number}", number).json()["parameters"]["update"] == number + 1
        assert send(client, "key1", 1).json()["parameters"]["update"] == 2
        assert send(client, "key0").json()["parameters"]["update"] == MAX_KEYS + 2, "forgotten"
        monkeypatch.setattr("ctta.serve.stream.MAX_KEYED_BYTES", 100)
        send(client, "large", 99)
        response = send(client, "large", 99)
        assert response.status_code == 200, "4 images of 5 classes take 80 bytes"
        send(client, "next", 100)
        response = send(client, "large", 99)
        assert response.status_code == 409 and "has counted already" in response.json()["error"]
        assert len(service.store.slots["a"].stream.keyed._results) == MAX_KEYS  # type: ignore[union-attr]
    assert MAX_KEYED_BYTES < 2**20
    again = build(tmp_path)
    assert len(again.factory.read("a").keyed._results) == MAX_KEYS
    again.release()


def test_entries_of_another_version_are_ignored_or_forgotten(tmp_path: Path) -> None:
    """A field that is unknown, and fields that are missing or of another kind; the stream itself goes on."""
    with serve_in_thread(build(tmp_path)) as client:
        answers = [send(client, f"key{number}", number).json() for number in range(4)]
    (path,) = (tmp_path / "state/streams/a").glob("*/window.safetensors")
    header, tensors = read_tensors(path, "stream")
    first, second, third, fourth = header["keyed"]
    first["new_field"] = 1
    del second["adapted"]
    third["ids"] = 5
    header["keyed"] = [first, second, third, [fourth]]
    write_tensors(path, tensors, "stream", header)
    with serve_in_thread(build(tmp_path)) as client:
        assert client.json("GET", "/streams/a")["updates"] == 4
        assert send(client, "key0").json() == answers[0]
        assert [send(client, f"key{number}", number).json()["parameters"]["update"] for number in (1, 2, 3)] == [
            5,
            6,
            7,
        ]
    assert not list((tmp_path / "state/streams").glob(".damaged*"))


def test_a_client_of_a_cluster_that_retries_after_a_death_teaches_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            body = json.dumps(infer_request("camera0", make_batch("camera0", 0))).encode()
            headers = ((b"idempotency-key", b"one"),)

            async def post() -> Any:
                status, content = await shards.request("POST", "/v2/models/ctta/infer", body=body, headers=headers)
                assert status == 200
                return json.loads(content)

            first = await post()
            await shards.process_of("camera0").service.store.save_all()
            await shards.kill("camera0")
            assert await post() == first and first["parameters"]["update"] == 1
            assert (await shards.infer("camera0", make_batch("camera0", 1)))[1]["parameters"]["update"] == 2

    asyncio.run(run())


def test_what_is_kept_holds_no_other_memory() -> None:
    """An answer is a part of that of a window, and one that is too large to keep leaves nothing behind."""
    kept, window = KeyedResults(), torch.zeros(64, 1000)
    result = InferenceResult(window[-1:], num_updates=1, adapted=True, batch_stats=1.0)

    def count_bytes() -> list[int]:
        return [each.logits.untyped_storage().nbytes() for _, each in kept._results.values()]

    kept.add("small", torch.zeros(1), result)
    assert count_bytes() == [4000]
    kept.add("large", torch.zeros(1), replace(result, logits=torch.zeros(MAX_KEYED_BYTES)))
    assert count_bytes() == [0, 0]
