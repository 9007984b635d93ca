"""A service that is stopped or killed resumes its streams bit-identically."""

import asyncio
import errno
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from command_line import user_error, write_network
from safetensors.torch import load
from serving import Client, ServerProcess, make_images, make_tent
from torch import Tensor

import ctta
from ctta.cli.serve import serve
from ctta.core.registry import DEFAULT_METHOD
from ctta.guard import Guarded
from ctta.models import load as load_network
from ctta.serve import Service, build_method
from ctta.serve import serve as run_service
from ctta.serve.app import StreamServer
from ctta.serve.stream import ServedStream

NAMES = ("left", "right", "Left.2")


def batch(name: str, number: int) -> Tensor:
    return make_images(6, 100 * NAMES.index(name) + number)


def test_streams_are_bit_identical_after_a_restart(tmp_path: Path) -> None:
    """With the default method, guard and window, one image at a time; the second server keeps one stream in memory."""
    state, options = tmp_path / "state", ("--set", "views=2", "--workers", 1)
    first = ServerProcess(state, *options)
    with first as client:
        for number in range(9):
            for name in NAMES:
                client.infer(name, batch(name, number)[:1])
        before = {name: client.state(name) for name in NAMES}
    assert first.process.returncode == 0
    with ServerProcess(state, *options, "--live-streams", 1) as client:
        assert client.json("GET", "/streams")["total"] == 3
        after = {name: client.state(name) for name in NAMES}
        answers = {name: client.infer(name, batch(name, 9)[:1]) for name in NAMES}
    for name in NAMES:
        one, other = load(before[name]), load(after[name])
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    # And the same as streams that never left this process.
    server = ServerProcess(state, *options)
    model = Guarded(
        build_method(load_network(server.spec), DEFAULT_METHOD, ["views=2"]),
        input_spec=ctta.guard.InputSpec(low=0, high=1),
    )
    for name in NAMES:
        alone = new_stream(tmp_path, model)
        for number in range(9):
            alone.infer(batch(name, number)[:1], adapt=True)
        last = alone.infer(batch(name, 9)[:1], adapt=True)
        assert np.array_equal(answers[name]["logits"].astype(np.float32), last.logits.numpy())
        assert answers[name]["update"] == last.num_updates >= 1


def new_stream(folder: Path, model: ctta.AdaptiveModel) -> ServedStream:
    service = Service(model, folder / f"alone-{len(list(folder.iterdir()))}")
    service.release()
    return service.factory.create("alone")


def test_a_kill_loses_only_what_came_after_the_last_snapshot(tmp_path: Path) -> None:
    state, options = tmp_path / "state", ("--method", "tent", "--no-guard", "--window", 0, "--snapshot-every", 0.05)
    server, done = ServerProcess(state, *options, "--live-streams", 2, "--workers", 2), dict.fromkeys(NAMES, 0)
    seen_saved = threading.Event()

    def send_images(name: str) -> None:
        client = Client(server.client.address)
        for number in range(400):
            try:
                client.infer(name, batch(name, number))
            except OSError:
                return  # killed
            done[name] = number + 1
            if number >= 5:
                seen_saved.set()

    with server:
        threads = [threading.Thread(target=send_images, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        assert seen_saved.wait(120)
        for _ in range(2000):  # until each stream has a snapshot
            files = (state / "streams").glob("*/[0-9]*/state.safetensors")
            if len({file.parent.parent for file in files}) >= len(NAMES):
                break
            threading.Event().wait(0.05)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        for thread in threads:
            thread.join(120)
    net = load_network(server.spec)
    with server as client:
        for name in NAMES:
            number = client.json("GET", f"/streams/{name}")["updates"]
            assert 1 <= number <= done[name] + 1  # the last may have been saved and not yet answered
            alone = build_method(net, "tent")
            for step in range(number):
                alone(batch(name, step))
            file = tmp_path / f"{name}.safetensors"
            file.write_bytes(client.state(name))
            stored = ctta.load(file, net)
            expected, found = alone.state_dict(), stored.state_dict()
            assert all(torch.equal(expected[key], found[key]) for key in expected)
            answer = client.infer(name, batch(name, number))
            assert np.array_equal(answer["logits"].astype(np.float32), alone(batch(name, number)).numpy())


class OldestServer(uvicorn.Server):
    """The oldest supported version in one respect: it ends without a shutdown if it has to exit while it starts."""

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets)
        if not self.should_exit:
            await self.main_loop()
            await self.shutdown(sockets)


@pytest.mark.parametrize("version", [uvicorn.Server, OldestServer])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["run", "startup", "on_started", "on_tick", "shutdown"])
def test_signals_at_any_moment_end_in_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals, version: type[uvicorn.Server]
) -> None:
    """Two of them, before or while the service starts, as soon as it listens, or while it stops already."""
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0, snapshot_interval=3600.0)
    asyncio.run(service.infer("a", make_images(6), adapt=True))
    monkeypatch.setattr(uvicorn.Server, "_serve", version._serve)

    def send_signals() -> None:
        for _ in range(2):
            signal.raise_signal(number)

    def send_first(function: Any) -> Any:
        def send_and_call(*arguments: Any, **options: Any) -> Any:
            send_signals()
            return function(*arguments, **options)

        return send_and_call

    if moment != "on_started":
        monkeypatch.setattr(StreamServer, moment, send_first(getattr(StreamServer, moment)))
    if moment == "shutdown":
        monkeypatch.setattr(StreamServer, "on_tick", send_first(StreamServer.on_tick))
    before = signal.getsignal(number)
    run_service(service, port=0, on_listening=lambda _url: send_signals() if moment == "on_started" else None)
    assert signal.getsignal(number) is before
    again = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    assert again.factory.read("a").num_updates == 1
    again.release()


def test_an_unfinished_snapshot_is_ignored(tmp_path: Path) -> None:
    """What a process that was killed while saving leaves behind is removed, and the previous snapshot counts."""
    service = Service(make_tent(tmp_path), tmp_path / "state")
    stream = service.factory.create("a")
    stream.infer(make_images(40), adapt=True)
    service.factory.snapshots.write(stream)
    unfinished = tmp_path / "state/streams/a/unfinished-2"
    unfinished.mkdir()
    (unfinished / "state.safetensors").write_bytes(b"half")
    service.release()
    again = Service(make_tent(tmp_path), tmp_path / "state")
    assert list(again.store.slots) == ["a"] and not unfinished.exists()
    assert again.factory.read("a").num_updates == 1
    again.release()


def test_an_unfinished_deletion_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that was killed while deleting a stream starts again without it."""
    service = Service(make_tent(tmp_path), tmp_path / "state")
    for name in ("a", "b"):
        service.factory.snapshots.write(service.factory.create(name))

    def delete_partially(folder: Path, **_: object) -> None:
        for file in folder.rglob("window.safetensors"):
            file.unlink()

    with monkeypatch.context() as patched:
        patched.setattr("ctta.serve.persistence.shutil.rmtree", delete_partially)
        service.factory.snapshots.delete("a")
    service.release()
    again = Service(make_tent(tmp_path), tmp_path / "state")
    assert list(again.store.slots) == ["b"]
    assert [path.name for path in (tmp_path / "state/streams").iterdir()] == ["b"]
    again.release()


def test_a_disk_error_at_start_is_not_mistaken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state")
    service.factory.snapshots.write(service.factory.create("a"))
    service.release()

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("ctta.serve.persistence.read_header", failing)
        service = Service(make_tent(tmp_path), tmp_path / "state")
    assert list(service.store.slots) == ["a"] and service.factory.read("a").num_updates == 0
    service.release()


def test_memory_that_leaves_nothing_for_streams_is_refused(tmp_path: Path) -> None:
    options = ("--model", write_network(tmp_path), "--state", tmp_path / "state")
    assert "leaves nothing for the streams, as requests may use 32 MB" in user_error(serve, *options, "--memory", 32)
    message = user_error(serve, *options, "--memory", 64, "--request-memory", 20)
    assert "max_request_bytes must be at least twice max_body_bytes" in message
