"""Shards of a service: one owner each, deaths cost no more than a snapshot, and what comes late does not count."""

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import NUM_SHARDS, History, LocalShards, end, local_shards, make_batch, make_service
from command_line import output, user_error
from fastapi import Response
from serving import TIMEOUT, infer_request, make_tent

from ctta.adapt.resume import lock_file
from ctta.cli.serve import ServiceRecipe, serve
from ctta.errors import ConfigError
from ctta.serve import Limits, Service, StateDirectory, Tokens
from ctta.serve.persistence import INCARNATION, ShardLostError, StreamFactory
from ctta.serve.ray import (
    RayOptions,
    RayService,
    Shard,
    SharedState,
    check_num_shards,
    create_front,
    find_shard,
    read_slots,
)
from ctta.serve.store import StreamSlot

STREAMS = [f"camera{number}" for number in range(5)]
STREAM = STREAMS[0]
SHARD = find_shard(STREAM, NUM_SHARDS)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note that a process would have ended, instead of ending this one."""
    found: list[str] = []
    monkeypatch.setattr("ctta.serve.ray.os._exit", lambda code: found.append(f"ended with {code}"))
    return found


def test_streams_are_spread_evenly() -> None:
    shares = Counter(find_shard(f"stream-{number}", 8) for number in range(4000))
    assert min(shares.values()) > 400 and max(shares.values()) < 600


# ---- deaths ----


async def run_load(
    shards: LocalShards,
    tmp_path: Path,
    num_batches: int,
    disturb: Callable[[], Awaitable[None]],
    *,
    before: Callable[[], bool],
) -> dict[str, History]:
    """Send batches to all streams at once, check every answer, and disturb the shards in the middle.

    Every stream stops after a third of its batches, until a condition holds, and goes on when the disturbance begins.
    """
    histories = {stream: History(make_tent(tmp_path, lr=0.01), stream) for stream in STREAMS}
    arrived, disturbed = asyncio.Barrier(len(STREAMS) + 1), asyncio.Event()

    async def drive(history: History) -> None:
        for number in range(num_batches):
            if number == num_batches // 3:
                await arrived.wait()
                await disturbed.wait()
            status, answer = await shards.infer(history.stream, make_batch(history.stream, number))
            while status != 200:
                assert status == 503, answer
                history.fail(number)
                await asyncio.sleep(0.05)
                status, answer = await shards.infer(history.stream, make_batch(history.stream, number))
            history.check(number, answer)

    async def disturb_in_the_middle() -> None:
        await arrived.wait()
        while not before():
            await asyncio.sleep(0.01)
        disturbed.set()
        await asyncio.sleep(0)  # the next requests are on their way
        await disturb()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb_in_the_middle())
        for history in histories.values():
            tasks.create_task(drive(history))
    return histories


def test_streams_of_a_killed_shard_resume_from_their_snapshots(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_shards(tmp_path, path, snapshot_interval=0.1) as shards:

            def is_saved() -> bool:
                slots = shards.process_of(STREAM).service.store.slots.values()
                return all(slot.num_saved_changes for slot in slots)

            histories = await run_load(shards, tmp_path, 15, lambda: shards.kill(STREAM), before=is_saved)
            assert shards.process_of(STREAM).state.incarnation == 2
            for name, history in histories.items():
                assert history.num_lost <= 5, "of the five batches before the kill, one at least was saved"
                is_orphan = find_shard(name, NUM_SHARDS) == SHARD
                assert is_orphan or (history.num_lost == 0 and history.batches == list(range(15)))

    asyncio.run(run())


def test_all_is_saved_at_the_end_and_one_process_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            for stream in STREAMS:
                await shards.infer(stream, make_batch(stream, 0))
            with pytest.raises(ConfigError, match="another process"):
                StateDirectory(tmp_path / "state")

    asyncio.run(run())
    service = Service(make_tent(tmp_path, lr=0.01), tmp_path / "state", image_size=(16, 16), window_size=0)
    try:
        assert sorted(service.store.slots) == STREAMS
        with pytest.raises(ConfigError, match="one process"):
            SharedState(str(tmp_path / "state"), NUM_SHARDS, 0)
        service.factory.snapshots.write(service.factory.read(STREAM))
    finally:
        service.release()

    async def run_again() -> None:
        async with local_shards(tmp_path) as shards:
            for stream in STREAMS:
                status, answer = await shards.infer(stream, make_batch(stream, 1))
                assert (status, answer["parameters"]["update"]) == (200, 2)

    asyncio.run(run_again())


# ---- processes that come back ----


def test_a_paused_process_that_comes_back_answers_nothing_and_overwrites_nothing(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    monkeypatch.setattr("ctta.serve.ray.CLAIM_INTERVAL", 1000.0)  # it comes back with a request

    async def run() -> None:
        async with local_shards(tmp_path, path) as shards:
            for number in range(3):
                await shards.infer(STREAM, make_batch(STREAM, number))
            former = shards.process_of(STREAM)
            await former.service.store.save_all()
            await shards.infer(STREAM, make_batch(STREAM, 3))  # not saved
            shards.processes[SHARD] = shards.start_shard(SHARD)
            status, answer = await shards.infer(STREAM, make_batch(STREAM, 4))
            assert status == 200 and answer["parameters"]["update"] == 4, "after the three that were saved"
            await shards.process_of(STREAM).service.store.save_all()
            before = shards.process_of(STREAM).service.factory.snapshots.read_summary(STREAM)
            monkeypatch.setattr("ctta.serve.ray.read_clock", lambda at=former._confirmed_at: at + 10.0)
            body = json.dumps(infer_request(STREAM, make_batch(STREAM, 5))).encode()
            scope = {"type": "http", "method": "POST", "path": "/v2/models/ctta/infer", "query_string": b""}
            with pytest.raises(ShardLostError, match="incarnation 2"):
                await former.handle({**scope, "headers": [(b"host", b"localhost")]}, body)
            assert ended
            served, snapshots = former.service.store.slots[STREAM].stream, former.service.factory.snapshots
            assert served is not None and served.num_updates == 5
            with pytest.raises(ShardLostError, match="incarnation 2"):
                snapshots.write(served)
            with pytest.raises(ShardLostError, match="incarnation 2"):
                snapshots.delete(STREAM)
            with pytest.raises(ShardLostError):
                snapshots.quarantine(STREAM)
            assert shards.process_of(STREAM).service.factory.snapshots.read_summary(STREAM) == before
            await end(former)

    asyncio.run(run())


def test_a_process_ends_soon_after_it_has_lost_its_shard(tmp_path: Path, path: str, ended: list[str]) -> None:
    async def run() -> None:
        async with local_shards(tmp_path, path) as shards:
            await shards.infer(STREAM, make_batch(STREAM, 0))
            former = shards.processes[SHARD]
            shards.processes[SHARD] = shards.start_shard(SHARD)
            async with asyncio.timeout(30.0):
                while not ended:
                    await asyncio.sleep(0.05)
            await end(former)

    asyncio.run(run())


def test_a_late_snapshot_of_a_former_process_never_counts(tmp_path: Path, path: str) -> None:
    """It has checked its claim, is paused, and publishes after its successor has read the state."""
    (one, factory), (other, _) = claim(path, tmp_path), claim(path, tmp_path)
    one._check_owner = lambda: None  # as long as it is paused
    stream = factory.create(STREAM)
    one.write(stream)
    publish, summaries = one._publish, []

    def publish_late(*arguments: Any) -> None:
        other.take_over(STREAM)
        summaries.append(other.read_summary(STREAM))
        publish(*arguments)

    one._publish = publish_late
    stream.num_requests = 7
    one.write(stream)
    assert summaries[0]["requests"] == 0 and other.read_summary(STREAM) == summaries[0]
    with pytest.raises(ShardLostError, match="newer process"):
        one.write(stream)
    assert min(other.numbers(STREAM)) < 2 * INCARNATION <= max(other.numbers(STREAM))
    other.write(stream)
    assert min(other.numbers(STREAM)) >= 2 * INCARNATION, "what came late is removed"


def claim(path: str, folder: Path) -> tuple[Any, StreamFactory]:
    """Claim the shard of a stream for another process; return its snapshots, and what creates its streams."""
    factory = make_service(SharedState(path, NUM_SHARDS, SHARD), folder, 60.0).factory
    return factory.snapshots, factory


def test_no_two_processes_get_the_same_incarnation(tmp_path: Path, path: str) -> None:
    states: list[SharedState] = []

    def claim_some() -> None:
        for _ in range(5):
            states.append(SharedState(path, NUM_SHARDS, SHARD))

    threads = [threading.Thread(target=claim_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(state.incarnation for state in states)
    assert len(set(found)) == 20
    for state in states:
        if state.incarnation == found[-1]:
            state.check_owner()
        else:
            with pytest.raises(ShardLostError):
                state.check_owner()
        state.release()


def test_markers_that_are_missing_do_not_turn_back_time(tmp_path: Path) -> None:
    """Somebody has copied the streams alone."""
    path = str(tmp_path / "state")
    for _ in range(3):
        snapshots, factory = claim(path, tmp_path)
    snapshots.write(factory.create(STREAM))
    for marker in (tmp_path / "state/shards").rglob("*-*"):
        marker.unlink()
    assert SharedState(path, NUM_SHARDS, SHARD).incarnation == 4


def test_a_shard_that_cannot_reach_its_state_answers_nothing(tmp_path: Path, ended: list[str]) -> None:
    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            await shards.infer(STREAM, make_batch(STREAM, 0))
            process = shards.processes[SHARD]

            state, hidden = tmp_path / "state", tmp_path / "unmounted"
            state.rename(hidden)  # as when the disk is not mounted
            process._confirmed_at -= 10.0
            status, answer = await shards.infer(STREAM, make_batch(STREAM, 1))
            assert status == 503 and "send it again" in answer["error"]
            assert not state.exists(), "nothing is written beside the state"
            hidden.rename(state)
            status, answer = await shards.infer(STREAM, make_batch(STREAM, 1))
            assert status == 200 and not ended

    asyncio.run(run())


def test_the_number_of_shards_is_fixed(tmp_path: Path, path: str) -> None:
    check_num_shards(path, 256)
    SharedState(path, 256, 7).release()
    check_num_shards(path, 256)
    with pytest.raises(ConfigError, match="--shards 256"):
        check_num_shards(path, 16)


# ---- the front ----


def test_the_front_merges_lists_metrics_and_readiness(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_shards(tmp_path, path) as shards:
            for stream in STREAMS:
                await shards.infer(stream, make_batch(stream, 0))
            running = await shards.running()
            assert running == sorted({find_shard(stream, NUM_SHARDS) for stream in STREAMS})
            await check_list(shards)
            text = (await shards.request("GET", "/metrics"))[1].decode()
            values = [line.split()[-1] for line in text.splitlines() if line.startswith("ctta_streams{")]
            assert len(values) == len(running) and sum(map(float, values)) == 5
            assert text.count("# HELP ctta_streams ") == 1 and f'shard="{SHARD}"' in text
            assert (await shards.request("GET", "/v2/health/ready"))[0] == 200
            cluster = json.loads((await shards.request("GET", "/cluster"))[1])
            assert cluster["shards"] == NUM_SHARDS and [each["shard"] for each in cluster["running"]] == running
            shown = await shards.request("GET", "/streams/camera3")
            assert json.loads(shown[1])["updates"] == 1
            body = gzip.compress(json.dumps(infer_request("camera3", make_batch("camera3", 1))).encode())
            _, content = await shards.request(
                "POST", "/v2/models/ctta/infer", body=body, headers=((b"content-encoding", b"gzip"),)
            )
            parameters = json.loads(content)["parameters"]
            assert parameters == {**parameters, "sequence_id": "camera3", "update": 2}
            shards.process_of(STREAM).service.store.is_closed = True
            assert (await shards.request("GET", "/v2/models/ctta/ready"))[0] == 503
            assert (await shards.request("GET", "/streams/nobody"))[0] == 404
            assert (await shards.request("GET", "/"))[1].startswith(b"<!doctype html>")
            assert (await shards.request("POST", "/v2/models/ctta/infer", body=b"{"))[0] == 400
            assert (await shards.request("GET", "/streams", query=b"limit=0"))[0] == 400
        async with local_shards(tmp_path, path) as shards:
            await shards.request("GET", f"/streams/{STREAM}")
            assert await shards.running() == [SHARD]
            await check_list(shards, images=36)
            assert await shards.running() == [SHARD], "listing starts no process"

    asyncio.run(run())


async def check_list(shards: LocalShards, *, images: int = 30) -> None:
    status, content = await shards.request("GET", "/streams", query=b"order=name&offset=1&limit=3")
    listed = json.loads(content)
    assert status == 200 and [each["name"] for each in listed["streams"]] == STREAMS[1:4]
    assert (listed["total"], listed["matching"], listed["totals"]["images"]) == (5, 5, images)


def test_tokens_are_checked_before_a_body_is_read(tmp_path: Path) -> None:
    tokens = Tokens("i" * 20, "a" * 20)

    async def run() -> None:
        async with local_shards(tmp_path, tokens=tokens) as shards:
            body = json.dumps(infer_request("a", make_batch("a", 0))).encode()
            for token, status in ((None, 401), ("x" * 20, 401), (tokens.infer, 200), (tokens.admin, 200)):
                found, _ = await shards.request("POST", "/v2/models/ctta/infer", body=body, token=token)
                assert found == status
            assert (await shards.request("POST", "/streams/a/image", body=b"x" * 2**25))[0] == 401
            for token, status in ((None, 401), (tokens.infer, 403), (tokens.admin, 200)):
                assert (await shards.request("POST", "/streams/a/reset", token=token))[0] == status
            for path, status in (("/streams", 401), ("/metrics", 401), ("/cluster", 401), ("/v2/health/ready", 200)):
                assert (await shards.request("GET", path))[0] == status
            assert (await shards.request("GET", "/streams/a/../a"))[0] == 401

    asyncio.run(run())


def test_a_shard_that_hangs_delays_neither_metrics_nor_readiness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctta.serve.ray.POLL_TIMEOUT", 0.2)

    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            for stream in STREAMS:
                await shards.infer(stream, make_batch(stream, 0))

            async def hang(*_arguments: object) -> None:
                await asyncio.sleep(60)

            shards.processes[SHARD].handle = hang  # type: ignore[assignment]
            assert (await shards.request("GET", "/v2/health/ready"))[0] == 200
            text = (await shards.request("GET", "/metrics"))[1].decode()
            assert "ctta_streams{" in text and f'shard="{SHARD}"' not in text
            shards.timeout = 0.2
            status, answer = await shards.infer(STREAM, make_batch(STREAM, 1))
            assert status == 504 and "may still count" in answer["error"]

    asyncio.run(run())


def test_requests_for_a_shard_that_does_not_start_end_in_time_and_keep_no_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            other = next(stream for stream in STREAMS if find_shard(stream, NUM_SHARDS) != SHARD)
            connect = shards.connect

            async def connect_others(shard: int) -> None:
                await (asyncio.sleep(60) if shard == SHARD else connect(shard))

            monkeypatch.setattr(shards, "connect", connect_others)
            shards.timeout = 0.2
            status, answer = await shards.infer(STREAM, make_batch(STREAM, 0))
            assert status == 503 and "nothing was done" in answer["error"]
            shards.timeout = 30.0
            waiting = [
                asyncio.create_task(shards.infer(STREAM, make_batch(STREAM, 0)))
                for _ in range(shards.options.limits.max_total_queue)
            ]
            while shards._num_asked[SHARD] < len(waiting):
                await asyncio.sleep(0.01)
            assert (await shards.infer(STREAM, make_batch(STREAM, 0)))[0] == 429
            assert (await shards.infer(other, make_batch(other, 0)))[0] == 200
            for task in waiting:
                task.cancel()

    asyncio.run(run())


def test_bodies_for_a_shard_that_hangs_keep_no_others_out(tmp_path: Path) -> None:
    """A paused process gets half of the memory for bodies, and a second one a third."""
    part = 2**20
    limits = Limits(max_body_bytes=part, max_request_bytes=4 * 12 * part)

    async def run() -> None:
        async with local_shards(tmp_path, limits=limits) as shards:
            first, second, third = {find_shard(stream, NUM_SHARDS): stream for stream in STREAMS}.values()
            await shards.infer(third, make_batch(third, 0))
            may_go_on = asyncio.Event()

            async def hang(*_arguments: object) -> Response:
                await may_go_on.wait()
                return Response()

            for stream in (first, second):
                await shards.infer(stream, make_batch(stream, 0))
                shards.process_of(stream).handle = hang  # type: ignore[assignment]
            sent = list[asyncio.Task[int]]()
            for stream, num_held in ((first, 6), (second, 3)):
                shard = find_shard(stream, NUM_SHARDS)
                for number in range(1, num_held + 1):
                    sent.append(asyncio.create_task(send_image(shards, stream, part)))
                    while shards._num_bytes[shard] < number * part:
                        assert not sent[-1].done()
                        await asyncio.sleep(0.01)
                assert await send_image(shards, stream, part) == 429
            assert await send_image(shards, third, part) == 400
            assert (await shards.request("GET", f"/streams/{third}"))[0] == 200
            waiting = asyncio.create_task(shards.request("GET", f"/streams/{first}"))
            await asyncio.sleep(0.1)
            may_go_on.set()
            assert (await waiting)[0] == 200 and {await task for task in sent} == {200}
            assert not shards._num_bytes.total()

    asyncio.run(run())


async def send_image(shards: LocalShards, stream: str, num_bytes: int) -> int:
    return (await shards.request("POST", f"/streams/{stream}/image", body=bytes(num_bytes)))[0]


class LocalActor:
    """The process of a shard, called as an actor of Ray is."""

    def __init__(self, process: Shard) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._process, name))


class SilentHead(RayService):
    """Shards on a cluster whose head may not answer for a while."""

    def __init__(self, options: RayOptions) -> None:
        super().__init__(options)
        self.actors: dict[int, LocalActor] = {}
        self.answers = threading.Event()
        self.num_calls = Counter[object]()

    def start_shard(self, shard: int) -> Any:
        self.num_calls[shard] += 1
        self.answers.wait()
        return self.actors[shard]

    def find_names(self, kind: str) -> list[str]:
        self.num_calls[kind] += 1
        self.answers.wait()
        return [f"{shard}" for shard in self.actors]


def test_a_head_that_is_silent_holds_up_nothing_on_shards_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests need the head, each waits its own time at most, and each call of the head is made once."""
    monkeypatch.setattr("ctta.serve.ray.POLL_TIMEOUT", 0.5)
    monkeypatch.setattr("ctta.serve.ray.MAX_AGE", 0.0)

    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            head = SilentHead(shards.options)
            shards.app = create_front(head)
            head.actors = {shard: LocalActor(shards.start_shard(shard)) for shard in range(NUM_SHARDS)}
            other = next(stream for stream in STREAMS if find_shard(stream, NUM_SHARDS) != SHARD)
            head.answers.set()
            assert (await shards.infer(STREAM, make_batch(STREAM, 0)))[0] == 200
            head.answers.clear()
            head.timeout = 1.0
            probes = [
                asyncio.create_task(shards.request("GET", path))
                for path in ("/v2/health/ready", "/metrics", "/streams", "/cluster", "/v2/models/ctta") * 10
            ]
            starting = [asyncio.create_task(shards.infer(other, make_batch(other, 0))) for _ in range(20)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(20.0):
                for number in range(1, 4):
                    status, answer = await shards.infer(STREAM, make_batch(STREAM, number))
                    assert (status, answer["parameters"]["update"]) == (200, number + 1)
                assert {(await probe)[0] for probe in probes} == {503}
                assert {(await task)[0] for task in starting} == {503}
            assert head.num_calls == {SHARD: 1, "shard": 1, find_shard(other, NUM_SHARDS): 1}
            head.answers.set()
            head.timeout = TIMEOUT
            assert (await shards.infer(other, make_batch(other, 0)))[0] == 200
            assert (await shards.request("GET", "/v2/health/ready"))[0] == 200
            for actor in head.actors.values():
                await actor.close.remote()

    asyncio.run(run())


def test_a_state_that_cannot_be_read_in_time_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.serve.ray.POLL_TIMEOUT", 0.5)
    answers, calls = threading.Event(), list[str]()

    def read(path: str) -> dict[str, StreamSlot]:
        calls.append(path)
        answers.wait()
        return read_slots(path)

    monkeypatch.setattr("ctta.serve.ray.read_slots", read)

    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            await shards.infer(STREAM, make_batch(STREAM, 0))
            lists = [asyncio.create_task(shards.request("GET", "/streams")) for _ in range(40)]
            await asyncio.sleep(0.1)
            assert (await shards.infer(STREAM, make_batch(STREAM, 1)))[0] == 200
            assert {(await each)[0] for each in lists} == {503} and len(calls) == 1
            answers.set()
            while (await shards.request("GET", "/streams"))[0] != 200:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_streams_of_a_shard_that_hangs_are_listed_as_they_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctta.serve.ray.POLL_TIMEOUT", 0.5)

    async def run() -> None:
        async with local_shards(tmp_path) as shards:
            for stream in STREAMS:
                await shards.infer(stream, make_batch(stream, 0))
            await shards.process_of(STREAM).service.store.save_all()

            async def hang(*_arguments: object) -> None:
                await asyncio.sleep(60)

            shards.processes[SHARD].list_streams = hang  # type: ignore[assignment]
            await check_list(shards)

    asyncio.run(run())


# ---- the command ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shards", 2], "--shards needs --ray"),
        (["--ray", "auto", "--state", "s3://bucket/streams"], "expected a path, got the URL"),
        (["--state", "memory://streams"], "expected a path, got the URL"),
        (["--ray", "auto"], "--ray needs --state"),
        (["--ray", "auto", "--state", "x", "--camera", "a=/dev/video0"], "--camera needs one process"),
    ],
)
def test_options_that_contradict_each_other(options: list[object], message: str) -> None:
    assert message in user_error(serve, "--model", "embedded", *options)


def test_a_state_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a folder of that name."""
    model = make_tent(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    uses: list[Callable[[], object]] = [
        lambda: Service(model, "s3://bucket/streams"),
        lambda: StateDirectory(Path("s3://bucket/streams")),
        lambda: RayOptions(lambda state: Service(model, state), "memory://streams"),
        lambda: SharedState("memory://streams", NUM_SHARDS, SHARD),
        lambda: lock_file(Path("s3://bucket/state.safetensors")).__enter__(),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="expected a path, got the URL"):
            use()
    assert not list(Path().iterdir())


def test_shards_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in other folders."""
    options: list[RayOptions] = []

    class FakeService:
        is_running = False

        def __init__(self, given: RayOptions) -> None:
            options.append(given)

        def start(self, *, host: str, port: int) -> None:
            assert host == "127.0.0.1"

        def stop(self) -> None:
            """Save nothing."""

    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("bird\ncat\n")
    monkeypatch.setattr("ctta.serve.ray.connect", lambda address: None)
    monkeypatch.setattr("ctta.cli.serve.threading.Event.wait", lambda *_: True)
    monkeypatch.setattr("ctta.serve.ray.RayService", FakeService)
    files = ("--classes", "names.txt", "--model", "file:net.py:build")
    output(serve, *files, "--ray", "auto", "--shards", 2, "--state", "streams")
    recipe = getattr(options[0].make_service, "__self__", None)
    assert isinstance(recipe, ServiceRecipe) and options[0].state == str(tmp_path / "streams")
    assert (options[0].num_shards, recipe.options.num_workers) == (2, 1)
    assert recipe.options.class_names == ["bird", "cat"]
    assert recipe.adaptation.model == f"file:{tmp_path / 'net.py'}:build"
    with pytest.warns(DeprecationWarning, match="--replicas"):
        output(serve, *files, "--ray", "auto", "--replicas", 2, "--state", "streams")
