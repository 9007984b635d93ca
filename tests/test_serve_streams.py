"""Streams of a service: in order, apart from each other, in memory or on disk, the same in either."""

import asyncio
import errno
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from serving import SIZE, Client, images, png, serving_here, tent

import ctta
from ctta.io.images import to_unit_floats
from ctta.serve import Limits, Service
from ctta.serve.errors import ApiError
from ctta.serve.persistence import directory_name, parse_directory_name
from ctta.serve.stream import SampleWindow, ServedStream


def test_requests_predict_and_adapt_as_the_model_itself_does(tmp_path: Path) -> None:
    model = tent(tmp_path)
    with serving_here(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        for step in range(3):
            answer = client.infer("camera", images(4, step))
            assert np.array_equal(answer["logits"].astype(np.float32), model(images(4, step)).numpy())
            assert answer["adapted"] and answer["update"] == step + 1
        only = client.infer("camera", images(4, 9), adapt=False)
        assert np.array_equal(only["logits"].astype(np.float32), model.predict(images(4, 9)).numpy())
        assert not only["adapted"] and only["update"] == 3
        assert np.array_equal(only["label"], only["logits"].argmax(1))
        # Another stream knows nothing of it.
        fresh = client.infer(7, images(4, 9))
        assert np.array_equal(fresh["logits"].astype(np.float32), model.fork()(images(4, 9)).numpy())
        assert [stream["name"] for stream in client.json("GET", "/streams")["streams"]] == ["7", "camera"]


def test_single_images_are_normalised_with_those_before(tmp_path: Path) -> None:
    """As the window says: the source first, then the model on the last images, with an update now and then."""
    model, source = tent(tmp_path, batch_stats=0.5), ctta.Source(tent(tmp_path).source)
    service = Service(model, tmp_path / "state", image_size=SIZE, window_size=6, update_every=3)
    pictures = [png(seed) for seed in range(12)]
    pixels = np.stack([np.array(Image.open(io.BytesIO(picture))) for picture in pictures])
    x = to_unit_floats(pixels).contiguous()
    with serving_here(service) as client:
        for number, picture in enumerate(pictures):
            answer = client.json("POST", "/streams/a/image?compare=true", data=picture)
            batch = x[max(0, number - 5) : number + 1]
            adapts = number in (3, 6, 9)
            answering = source.predict if number < 3 else model if adapts else model.predict
            expected = answering(batch[-1:] if number < 3 else batch)[-1]  # the source has no use for the others
            confidence, label = expected.double().softmax(0).max(0)
            assert (answer["class"], answer["confidence"]) == (int(label), round(float(confidence), 6))
            assert answer["adapted"] == adapts and (answer["reason"] is None) == adapts
            assert answer["source"]["class"] == int(source.predict(x[number : number + 1]).argmax())
        shown = client.json("GET", "/streams/a")
    assert (shown["updates"], shown["images"], shown["requests"]) == (3, 12, 12)
    assert len(shown["confidences"]) == 12


def test_a_window_keeps_the_newest_images() -> None:
    window = SampleWindow(4, 2)
    for number in range(6):
        window.push(torch.full((1, 1, 1, 1), float(number)), updated=False)
    assert window.make_batch(torch.full((1, 1, 1, 1), 9.0)).flatten().tolist() == [3, 4, 5, 9]
    assert window.make_batch(torch.zeros(5, 1, 1, 1)).shape == (5, 1, 1, 1)
    assert window.make_batch(torch.zeros(1, 1, 2, 2)).shape == (1, 1, 2, 2)  # of another size, so alone


def test_classes_have_names(tmp_path: Path) -> None:
    names = ["bird", "cat", "dog", "frog", "ship"]
    with serving_here(Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, class_names=names)) as client:
        answer = client.json("POST", "/streams/a/image", data=png(side=40))  # of another size, so resized
        assert answer["label"] == names[answer["class"]]
    with pytest.raises(ValueError, match="2 class names for a network with 5 classes"):
        Service(tent(tmp_path), tmp_path / "other", image_size=SIZE, class_names=["cat", "dog"])


def test_two_hundred_streams_on_a_small_cap_are_as_if_each_were_alone(tmp_path: Path) -> None:
    model, limits = tent(tmp_path), Limits(max_live_streams=3, max_streams=200)
    with serving_here(
        Service(model, tmp_path / "state", image_size=SIZE, limits=limits, window_size=0, num_workers=2)
    ) as client:
        for number in range(200):
            client.infer(f"s{number}", images(2, number))
        again = [*range(0, 200, 25), 199]
        answers = [client.infer(f"s{number}", images(2, 1000 + number)) for number in again]
        refused = client.call("POST", "/streams/one-more/image", data=png())
        assert refused.status_code == 429 and "delete one" in refused.json()["error"] and refused.headers["Retry-After"]
        listed = client.json("GET", "/streams?limit=1000")
        assert listed["total"] == 200 and sum(stream["live"] for stream in listed["streams"]) <= 3
        assert "ctta_live_streams 3.0\n" in client.call("GET", "/metrics").text
    for number, answer in zip(again, answers, strict=True):
        alone = model.fork()
        alone(images(2, number))
        assert np.array_equal(answer["logits"].astype(np.float32), alone(images(2, 1000 + number)).numpy())
        assert answer["update"] == 2


def test_streams_share_the_source(tmp_path: Path) -> None:
    service = Service(
        tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=Limits(max_live_streams=2), num_workers=1
    )
    with serving_here(service) as client:
        for name in ("a", "b", "c", "a"):
            client.infer(name, images(40))
        live = [entry.stream for entry in service.store.slots.values() if entry.stream]
        assert {stream.name for stream in live} == {"a", "c"}  # one of them came back from disk
        assert all(stream.model.source is service.factory.template.source for stream in live)


def test_memory_is_capped(tmp_path: Path) -> None:
    one = sum(value.nbytes for value in tent(tmp_path).student.state_dict().values())
    limits = Limits(max_live_bytes=4 * one)  # Adam keeps moments of the few parameters that TENT trains
    with serving_here(
        Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=limits, window_size=0, num_workers=1)
    ) as client:
        for number in range(8):
            client.infer(f"s{number}", images(2))
        assert 1 <= sum(stream["live"] for stream in client.json("GET", "/streams")["streams"]) <= 4


def test_two_clients_on_one_stream_take_turns(tmp_path: Path) -> None:
    """Each update counts once, and the answers are those of one order in which the requests came."""
    model = tent(tmp_path)
    x = images(4)
    with serving_here(Service(model, tmp_path / "state", image_size=SIZE, window_size=0, num_workers=2)) as client:

        def send(_number: int) -> dict[str, Any]:
            return Client(client.address).infer("shared", x)

        with ThreadPoolExecutor(2) as pool:
            answers = sorted(pool.map(send, range(12)), key=lambda answer: answer["update"])
        assert client.json("GET", "/streams/shared")["updates"] == 12
    assert [answer["update"] for answer in answers] == list(range(1, 13))
    for answer in answers:
        assert np.array_equal(answer["logits"].astype(np.float32), model(x).numpy())


def test_full_queues_ask_to_come_back_later(tmp_path: Path) -> None:
    service = Service(
        tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=Limits(max_queue=2), window_size=0, num_workers=1
    )
    with serving_here(service) as client:
        client.infer("busy", images(4))
        release, waiting = threading.Event(), 3
        stream = service.store.slots["busy"].stream
        assert stream
        infer = stream.infer
        stream.infer = lambda x, **options: (release.wait(60), infer(x, **options))[1]  # type: ignore[method-assign]
        with ThreadPoolExecutor(waiting) as pool:
            sent = [
                pool.submit(Client(client.address).call, "POST", "/streams/busy/image", data=png())
                for _ in range(waiting)
            ]
            while not any(future.done() for future in sent):
                threading.Event().wait(0.01)
            release.set()
            responses = [future.result() for future in sent]
        refused = [response for response in responses if response.status_code == 429]
        assert len(refused) == 1 and int(refused[0].headers["Retry-After"]) >= 1
        assert client.json("GET", "/streams/busy")["updates"] == 3


def test_a_body_that_is_allowed_alone_finds_room_alone(tmp_path: Path) -> None:
    limits = Limits(max_body_bytes=2**20, max_total_body_bytes=2**10)  # as --body makes it, which only raises the first
    with serving_here(Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=limits)) as client:
        assert client.call("PUT", "/streams/a/state", data=bytes(2**12)).status_code == 400  # and not 429, for ever


def test_time_runs_out_for_a_request_but_not_for_its_update(tmp_path: Path) -> None:
    service = Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_workers=1)
    with serving_here(service) as client:
        client.infer("slow", images(4))
        service.store.limits = Limits(request_timeout=0.3)
        release = threading.Event()
        stream = service.store.slots["slow"].stream
        assert stream
        infer = stream.infer
        stream.infer = lambda x, **options: (release.wait(60), infer(x, **options))[1]  # type: ignore[method-assign]
        begun = client.call("POST", "/streams/slow/image", data=png())
        queued = client.call("POST", "/streams/slow/image", data=png())
        release.set()
        assert (begun.status_code, queued.status_code) == (504, 503) and queued.headers["Retry-After"]
    kept = Service(tent(tmp_path), tmp_path / "state", image_size=SIZE)
    assert kept.factory.snapshots.read_summary("slow")["updates"] == 2  # the one that had begun
    kept.release()


def test_a_stop_in_the_middle_of_a_snapshot_waits_for_it(tmp_path: Path) -> None:
    """Two threads that write one stream at once would spoil each other's files."""
    service = Service(
        tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_workers=2, snapshot_interval=0.01
    )
    store, writing, release = service.store, threading.Event(), threading.Event()
    write, under_way, at_once = service.factory.snapshots.write, [0], []

    def slowly(stream: ServedStream) -> None:
        under_way[0] += 1
        at_once.append(under_way[0])
        writing.set()
        release.wait(60)
        write(stream)
        under_way[0] -= 1

    service.factory.snapshots.write = slowly  # type: ignore[method-assign]

    async def stop_while_saving() -> None:
        await service.infer("a", images(4), adapt=True)
        saving = asyncio.create_task(store.autosave_loop())
        await asyncio.to_thread(writing.wait, 60)
        saving.cancel()
        asyncio.get_running_loop().call_later(0.2, release.set)
        with suppress(asyncio.CancelledError):
            await saving
        await store.close()

    asyncio.run(stop_while_saving())
    service.release()
    assert set(at_once) == {1}
    assert service.factory.read("a").num_updates == 1


def test_a_stream_that_is_refused_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    service = Service(
        tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=Limits(max_total_queue=1), num_workers=1
    )

    async def crowd() -> list[object]:
        sent = [service.infer(f"s{number}", images(4), adapt=True) for number in range(5)]
        return await asyncio.gather(*sent, return_exceptions=True)

    answers = asyncio.run(crowd())
    assert sum(isinstance(answer, ApiError) and answer.status == 429 for answer in answers) == 4
    assert list(service.store.slots) == ["s0"]
    service.release()


def test_an_exhausted_budget_leaves_updates_out_and_says_so(tmp_path: Path) -> None:
    service = Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, time_budget=1e-9)
    with serving_here(service) as client:
        assert client.infer("a", images(4))["adapted"]
        assert not client.infer("a", images(4))["adapted"]
        assert not client.infer("a", images(4))["adapted"]
        shown = client.json("GET", "/streams/a")
        assert (shown["updates"], shown["images"], shown["skipped"]["budget"]) == (1, 12, 2)
        assert "ctta_updates_over_budget_total 2.0\n" in client.call("GET", "/metrics").text
    events = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["new", "update skipped", "update skipped"]


def test_an_operator_resets_freezes_and_deletes(tmp_path: Path) -> None:
    with serving_here(Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        first = client.infer("a", images(4))
        client.infer("a", images(4, 1))
        assert client.json("POST", "/streams/a/freeze")["frozen"]
        assert not client.infer("a", images(4))["adapted"]
        assert not client.json("POST", "/streams/a/unfreeze")["frozen"]
        assert client.json("POST", "/streams/a/reset")["updates"] == 0
        assert np.array_equal(client.infer("a", images(4))["logits"], first["logits"])
        kinds = [event["kind"] for event in client.json("GET", "/streams/a")["events"]]
        assert kinds == ["new", "freeze", "unfreeze", "reset"]
        client.json("DELETE", "/streams/a")
        assert client.call("GET", "/streams/a").status_code == 404
        assert client.call("POST", "/streams/a/reset").status_code == 404
        assert client.call("POST", "/streams/a/explode").status_code == 400
    assert not list((tmp_path / "state/streams").iterdir())


def test_a_state_comes_down_and_goes_up(tmp_path: Path) -> None:
    model = tent(tmp_path)
    with serving_here(Service(model, tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        model(images(4)), client.infer("a", images(4))
        file = tmp_path / "a.safetensors"
        file.write_bytes(client.state("a"))
        loaded = ctta.load(file, tent(tmp_path).copy_of_source())
        assert torch.equal(loaded(images(4, 1)), model.fork().predict(images(4, 1))) is False
        assert client.json("PUT", "/streams/b/state", data=file.read_bytes())["updates"] == 1
        assert np.array_equal(client.infer("b", images(4, 1))["logits"].astype(np.float32), model(images(4, 1)).numpy())
        other = tmp_path / "other.safetensors"
        ctta.save(ctta.BNStats(tent(tmp_path).copy_of_source()), other)
        faster = tmp_path / "faster.safetensors"
        ctta.save(tent(tmp_path, batch_stats=0.5), faster)
        for body in (b"", b"nonsense", file.read_bytes()[:-5], other.read_bytes(), faster.read_bytes()):
            refused = client.call("PUT", "/streams/c/state", data=body)
            assert refused.status_code == 400 and str(tmp_path) not in refused.text
        assert client.call("GET", "/streams/c").status_code == 404


def test_weights_that_are_not_finite_do_not_go_up(tmp_path: Path) -> None:
    model, file = tent(tmp_path), tmp_path / "a.safetensors"
    with torch.no_grad():
        next(model.student.parameters()).fill_(torch.nan)
    ctta.save(model, file)
    with serving_here(Service(tent(tmp_path), tmp_path / "state", image_size=SIZE)) as client:
        refused = client.call("PUT", "/streams/a/state", data=file.read_bytes())
    assert refused.status_code == 400 and "not finite" in refused.json()["error"]


def test_a_disk_that_fails_for_a_while_is_no_reason_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)
    with serving_here(service) as client:

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(service.factory.log, "append", fail)
            refused = client.call("POST", "/streams/a/image", data=png())
        assert refused.status_code == 503 and refused.headers["Retry-After"] and "delete" not in refused.text
        assert client.infer("a", images(4))["update"] == 1


def test_a_folder_is_of_one_process_and_of_one_method(tmp_path: Path) -> None:
    service = Service(tent(tmp_path), tmp_path / "state")
    with pytest.raises(ValueError, match="another process serves"):
        Service(tent(tmp_path), tmp_path / "state")
    service.release()
    with pytest.raises(ValueError, match=r"started with settings .*batch_stats=1\.0"):
        Service(tent(tmp_path, batch_stats=0.5), tmp_path / "state")


@pytest.mark.parametrize("name", ["a", "A", "a.b", "_"[:0] + "x_41", "9-", "Z" * 64])
def test_names_and_folders_go_both_ways(name: str) -> None:
    assert parse_directory_name(directory_name(name)) == name
    assert directory_name(name) == directory_name(name).lower()


@pytest.mark.parametrize("folder", ["..", ".a", "A", "_zz", "_2e_2e", "a_", "x" * 70])
def test_other_folders_are_no_streams(folder: str) -> None:
    assert parse_directory_name(folder) is None
