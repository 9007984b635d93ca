"""The store of streams: turns, queues and limits, and streams that move between memory and disk unchanged."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import SIZE, Client, make_images, make_png, make_tent, serve_in_thread

from ctta.errors import ConfigError
from ctta.serve import Limits, Service
from ctta.serve.http import ApiError
from ctta.serve.persistence import directory_name, parse_directory_name
from ctta.serve.stream import ServedStream


def test_two_hundred_streams_with_three_in_memory_equal_isolated_ones(tmp_path: Path) -> None:
    model, limits = make_tent(tmp_path), Limits(max_live_streams=3, max_streams=200)
    with serve_in_thread(
        Service(model, tmp_path / "state", image_size=SIZE, limits=limits, window_size=0, num_workers=2)
    ) as client:
        for number in range(200):
            client.infer(f"s{number}", make_images(2, number))
        again = [*range(0, 200, 25), 199]
        answers = [client.infer(f"s{number}", make_images(2, 1000 + number)) for number in again]
        rejected = client.call("POST", "/streams/one-more/image", data=make_png())
        assert rejected.status_code == 429 and rejected.headers["Retry-After"]
        assert "delete one" in rejected.json()["error"]
        listed = client.json("GET", "/streams?limit=1000")
        assert listed["total"] == 200 and sum(stream["live"] for stream in listed["streams"]) <= 3
        assert "ctta_live_streams 3.0\n" in client.call("GET", "/metrics").text
    for number, answer in zip(again, answers, strict=True):
        alone = model.fork()
        alone(make_images(2, number))
        assert np.array_equal(answer["logits"].astype(np.float32), alone(make_images(2, 1000 + number)).numpy())
        assert answer["update"] == 2


def test_streams_share_the_source(tmp_path: Path) -> None:
    service = Service(
        make_tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=Limits(max_live_streams=2), num_workers=1
    )
    with serve_in_thread(service) as client:
        for name in ("a", "b", "c", "a"):
            client.infer(name, make_images(40))
        live = [slot.stream for slot in service.store.slots.values() if slot.stream]
        assert {stream.name for stream in live} == {"a", "c"}  # one of them came back from disk
        shared = [id(value) for value in service.factory.template.source.state_dict(keep_vars=True).values()]
        for stream in live:
            assert [id(value) for value in stream.model.source.state_dict(keep_vars=True).values()] == shared


def test_memory_is_limited(tmp_path: Path) -> None:
    one = sum(value.nbytes for value in make_tent(tmp_path).student.state_dict().values())
    limits = Limits(max_live_bytes=4 * one)  # Adam keeps moments of the few parameters that TENT trains
    with serve_in_thread(
        Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=limits, window_size=0, num_workers=1)
    ) as client:
        for number in range(8):
            client.infer(f"s{number}", make_images(2))
        assert 1 <= sum(stream["live"] for stream in client.json("GET", "/streams")["streams"]) <= 4


def test_two_clients_on_one_stream_take_turns(tmp_path: Path) -> None:
    """Each update counts once, and the answers are those of requests in some order."""
    model = make_tent(tmp_path)
    x = make_images(4)
    with serve_in_thread(Service(model, tmp_path / "state", image_size=SIZE, window_size=0, num_workers=2)) as client:

        def send(_number: int) -> dict[str, Any]:
            return Client(client.address).infer("shared", x)

        with ThreadPoolExecutor(2) as pool:
            answers = sorted(pool.map(send, range(12)), key=lambda answer: answer["update"])
        assert client.json("GET", "/streams/shared")["updates"] == 12
    assert [answer["update"] for answer in answers] == list(range(1, 13))
    for answer in answers:
        assert np.array_equal(answer["logits"].astype(np.float32), model(x).numpy())


def test_full_queues_answer_with_retry_after(tmp_path: Path) -> None:
    service = Service(
        make_tent(tmp_path),
        tmp_path / "state",
        image_size=SIZE,
        limits=Limits(max_queue=2),
        window_size=0,
        num_workers=1,
    )
    with serve_in_thread(service) as client:
        client.infer("busy", make_images(4))
        release, num_clients = threading.Event(), 3
        stream = service.store.slots["busy"].stream
        assert stream
        infer = stream.infer
        stream.infer = lambda x, **options: (release.wait(60), infer(x, **options))[1]  # type: ignore[method-assign]
        with ThreadPoolExecutor(num_clients) as pool:
            sent = [
                pool.submit(Client(client.address).call, "POST", "/streams/busy/image", data=make_png())
                for _ in range(num_clients)
            ]
            while not any(future.done() for future in sent):
                threading.Event().wait(0.01)
            release.set()
            responses = [future.result() for future in sent]
        rejected = [response for response in responses if response.status_code == 429]
        assert len(rejected) == 1 and int(rejected[0].headers["Retry-After"]) >= 1
        assert client.json("GET", "/streams/busy")["updates"] == 3


def test_a_timeout_ends_the_request_but_not_its_update(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_workers=1)
    with serve_in_thread(service) as client:
        client.infer("slow", make_images(4))
        service.store.limits = Limits(request_timeout=0.3)
        release = threading.Event()
        stream = service.store.slots["slow"].stream
        assert stream
        infer = stream.infer
        stream.infer = lambda x, **options: (release.wait(60), infer(x, **options))[1]  # type: ignore[method-assign]
        started = client.call("POST", "/streams/slow/image", data=make_png())
        queued = client.call("POST", "/streams/slow/image", data=make_png())
        release.set()
        assert (started.status_code, queued.status_code) == (504, 503) and queued.headers["Retry-After"]
    restarted = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE)
    assert restarted.factory.snapshots.read_summary("slow")["updates"] == 2  # the one that had started too
    restarted.release()


def test_shutdown_waits_for_a_snapshot_being_written(tmp_path: Path) -> None:
    """Two threads that write one stream at once would corrupt each other's files."""
    service = Service(
        make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_workers=2, snapshot_interval=0.01
    )
    store, writing, release = service.store, threading.Event(), threading.Event()
    write, num_writing, observed = service.factory.snapshots.write, [0], []

    def write_slowly(stream: ServedStream) -> None:
        num_writing[0] += 1
        observed.append(num_writing[0])
        writing.set()
        release.wait(60)
        write(stream)
        num_writing[0] -= 1

    service.factory.snapshots.write = write_slowly  # type: ignore[method-assign]

    async def shut_down_while_saving() -> None:
        await service.infer("a", make_images(4), adapt=True)
        autosave = asyncio.create_task(store.autosave_loop())
        await asyncio.to_thread(writing.wait, 60)
        autosave.cancel()
        asyncio.get_running_loop().call_later(0.2, release.set)
        with suppress(asyncio.CancelledError):
            await autosave
        await store.close()

    asyncio.run(shut_down_while_saving())
    service.release()
    assert set(observed) == {1}
    assert service.factory.read("a").num_updates == 1


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("out of memory")])
def test_autosave_continues_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, snapshot_interval=0.01)
    snapshots, written, errors = service.factory.snapshots, threading.Event(), [error]
    write = snapshots.write

    def fail_once(stream: ServedStream) -> None:
        if errors:
            raise errors.pop()
        write(stream)
        written.set()

    monkeypatch.setattr(snapshots, "write", fail_once)
    with serve_in_thread(service) as client:
        client.infer("a", make_images(40))
        assert written.wait(60)
        assert "ctta_snapshot_failures_total 1.0\n" in client.call("GET", "/metrics").text
    assert service.factory.read("a").num_updates == 1


def test_a_request_rejected_by_a_full_queue_creates_no_stream(tmp_path: Path) -> None:
    service = Service(
        make_tent(tmp_path), tmp_path / "state", image_size=SIZE, limits=Limits(max_total_queue=1), num_workers=1
    )

    async def send_five_requests() -> list[object]:
        sent = [service.infer(f"s{number}", make_images(4), adapt=True) for number in range(5)]
        return await asyncio.gather(*sent, return_exceptions=True)

    answers = asyncio.run(send_five_requests())
    assert sum(isinstance(answer, ApiError) and answer.status == 429 for answer in answers) == 4
    assert list(service.store.slots) == ["s0"]
    service.release()


def test_a_disk_that_cannot_be_read_is_answered_with_503(tmp_path: Path) -> None:
    """The error may be temporary, so that the stream is neither lost nor set aside."""
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)
    service.factory.snapshots.write(service.factory.create("a"))
    service.release()
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        streams = tmp_path / "state/streams"
        streams.rename(tmp_path / "unmounted")
        streams.write_text("not a folder")  # reading below it fails with ENOTDIR
        response = client.call("POST", "/streams/a/image", data=make_png())
        assert response.status_code == 503 and response.headers["Retry-After"] and "delete" not in response.text
        streams.unlink()
        (tmp_path / "unmounted").rename(streams)
        assert client.infer("a", make_images(4))["update"] == 1


def test_a_directory_belongs_to_one_process_and_one_method(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state")
    with pytest.raises(ConfigError, match="another process serves"):
        Service(make_tent(tmp_path), tmp_path / "state")
    service.release()
    with pytest.raises(ConfigError, match=r"other settings \(settings: .*batch_stats='auto'.* → .*batch_stats=0\.5"):
        Service(make_tent(tmp_path, batch_stats=0.5), tmp_path / "state")


@pytest.mark.parametrize("name", ["a", "A", "a.b", "x_41", "9-", "Z" * 64])
def test_directory_names_round_trip(name: str) -> None:
    assert parse_directory_name(directory_name(name)) == name
    assert directory_name(name) == directory_name(name).lower()


@pytest.mark.parametrize("directory", ["..", ".a", "A", "_zz", "_2e_2e", "a_", "x" * 70])
def test_other_directories_are_not_streams(directory: str) -> None:
    assert parse_directory_name(directory) is None
