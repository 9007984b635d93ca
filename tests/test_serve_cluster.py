"""Streams on several replicas: one owner each, moves with nothing lost, deaths that cost no more than a snapshot."""

import asyncio
import gzip
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import Handle, History, LocalCluster, local_cluster, make_batch
from command_line import user_error
from serving import infer_request, make_tent

from ctta.cli.serve import serve
from ctta.serve import Tokens
from ctta.serve.cluster.messages import HttpRequest, call_app
from ctta.serve.cluster.snapshots import OwnershipLostError
from ctta.serve.cluster.state import SharedFiles, SharedState
from ctta.serve.cluster.view import View

STREAMS = [f"camera{number}" for number in range(5)]


async def run_load(
    cluster: LocalCluster, tmp_path: Path, num_batches: int, disturb: Callable[[], Awaitable[None]]
) -> dict[str, History]:
    """Send batches to all streams at once, check every answer, and disturb the cluster in the middle."""
    histories = {stream: History(make_tent(tmp_path, lr=0.01), stream) for stream in STREAMS}
    progress = asyncio.Event()

    async def drive(history: History) -> None:
        for number in range(num_batches):
            status, answer = await cluster.infer(history.stream, make_batch(history.stream, number))
            while status != 200:
                assert status == 503, answer
                history.fail(number)
                await asyncio.sleep(0.05)
                status, answer = await cluster.infer(history.stream, make_batch(history.stream, number))
            history.check(number, answer)
            if number == num_batches // 3:
                progress.set()

    async def disturb_in_the_middle() -> None:
        await progress.wait()
        await disturb()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb_in_the_middle())
        for history in histories.values():
            tasks.create_task(drive(history))
    return histories


@pytest.fixture(params=["folder", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def test_a_new_member_takes_its_share_and_nothing_else_moves() -> None:
    streams = [f"stream-{number}" for number in range(4000)]
    before = View(1, {f"r{number}": "x" for number in range(8)})
    after = View(2, {**before.members, "r8": "x"})
    shares = Counter(before.owner(stream) for stream in streams)
    assert min(shares.values()) > 300 and max(shares.values()) < 700
    moved = {stream for stream in streams if before.owner(stream) != after.owner(stream)}
    assert {after.owner(stream) for stream in moved} == {"r8"} and 250 < len(moved) < 700


def test_adding_and_removing_a_replica_under_load_loses_nothing(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, path, num_replicas=2) as cluster:

            async def disturb() -> None:
                cluster.start("r2")
                await cluster.until_members("r0", "r1", "r2")
                assert any(cluster.coordinator.view.owner(stream) == "r2" for stream in STREAMS)
                cluster.coordinator.leave("r0")
                await cluster.until(lambda: set(cluster.coordinator.view.members) == {"r1", "r2"})

            histories = await run_load(cluster, tmp_path, 12, disturb)
            assert all(history.num_lost == 0 for history in histories.values())
            assert all(history.batches == list(range(12)) for history in histories.values())
            assert not cluster.replicas["r0"].service.store.slots

    asyncio.run(run())


def test_streams_of_a_killed_replica_resume_from_their_snapshots(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, path, lease=2.0, snapshot_interval=0.1) as cluster:
            victim = cluster.coordinator.view.owner(STREAMS[0])
            assert victim is not None

            async def disturb() -> None:
                await cluster.until(lambda: stored_updates(cluster, victim) > 0)
                cluster.kill(victim)
                await cluster.until(lambda: victim not in cluster.coordinator.view.members)

            histories = await run_load(cluster, tmp_path, 15, disturb)
            orphans = {
                name for name in STREAMS if View(1, dict.fromkeys(["r0", "r1", "r2"], "x")).owner(name) == victim
            }
            for name, history in histories.items():
                assert history.num_lost < 12, "it starts over only if it was never saved"
                assert name in orphans or (history.num_lost == 0 and history.batches == list(range(15)))

    asyncio.run(run())


def stored_updates(cluster: LocalCluster, name: str) -> int:
    """Return the least number of updates in the snapshots of a replica's streams."""
    service = cluster.replicas[name].service
    names = list(service.store.slots)
    if not names or any(slot.num_saved_changes == 0 for slot in service.store.slots.values()):
        return 0
    return min(int((slot.last_summary or {})["updates"]) for slot in service.store.slots.values())


def test_a_replica_that_was_thought_dead_overwrites_nothing_and_answers_nothing(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, path, lease=2.0) as cluster:
            stream = STREAMS[0]
            for number in range(3):
                await cluster.infer(stream, make_batch(stream, number))
            former = cluster.coordinator.view.owner(stream) or ""
            replica = cluster.replicas[former]
            served = replica.service.store.slots[stream].stream
            assert served is not None
            await replica.service.store.save_all()
            await cluster.infer(stream, make_batch(stream, 3))  # not saved
            replica._coordinator = Handle(lambda: None)  # it is cut off, but alive
            del cluster.replicas[former]
            await cluster.until(lambda: former not in cluster.coordinator.view.members)
            assert not replica.has_lease and await replica.handle(stream, HttpRequest("GET", "/", b"", [])) is None
            await cluster.front.update_view()
            status, answer = await cluster.infer(stream, make_batch(stream, 4))
            assert status == 200 and answer["parameters"]["update"] == 4
            owner = cluster.replicas[cluster.coordinator.view.owner(stream) or ""]
            await owner.service.store.save_all()
            before = owner.service.factory.snapshots.read_summary(stream)
            snapshots = replica.service.factory.snapshots
            with pytest.raises(OwnershipLostError, match="lost its lease"):
                snapshots.write(served)
            snapshots._may_write = lambda: True  # type: ignore[attr-defined]  # paused after it had checked its lease
            with pytest.raises(OwnershipLostError, match="newer owner"):
                snapshots.write(served)
            with pytest.raises(OwnershipLostError, match="newer owner"):
                snapshots.delete(stream)
            assert owner.service.factory.snapshots.read_summary(stream) == before

    asyncio.run(run())


def test_a_late_snapshot_of_a_former_owner_never_counts(tmp_path: Path, path: str) -> None:
    """It checked that nobody else owns the stream, was paused, and publishes after the new owner has read its state."""

    async def run() -> None:
        async with local_cluster(tmp_path, path, num_replicas=1) as cluster:
            stream = STREAMS[0]
            await cluster.infer(stream, make_batch(stream, 0))
            store = cluster.replicas["r0"].service.store
            await store.save_all()
            former = store.factory.snapshots
            state = SharedState(path, "other", owns=lambda _: True, may_write=lambda: True)
            newer = state.open_snapshots()
            newer.epoch = cluster.coordinator.view.epoch + 5
            publish, summaries = former._publish, []

            def publish_late(*arguments: Any) -> None:
                newer.state_file(stream)  # claims
                summaries.append(newer.read_summary(stream))
                publish(*arguments)

            former._publish = publish_late  # type: ignore[assignment]
            await cluster.infer(stream, make_batch(stream, 1))
            served = store.slots[stream].stream
            assert served is not None
            with pytest.raises(OwnershipLostError, match="newer owner"):
                former.write(served)
            assert summaries[0]["updates"] == 1
            assert newer.read_summary(stream) == summaries[0]
            assert store.factory.snapshots.lost == {stream}  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_request_that_is_being_read_holds_up_the_move_of_its_stream(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1) as cluster:
            stream = next(name for name in STREAMS if View(1, {"r0": "x", "r1": "x"}).owner(name) == "r1")
            await cluster.infer(stream, make_batch(stream, 0))
            replica, reached, proceed = cluster.replicas["r0"], asyncio.Event(), asyncio.Event()
            infer = replica.service.infer

            async def infer_late(*arguments: Any, **options: Any) -> Any:
                reached.set()
                await proceed.wait()
                return await infer(*arguments, **options)

            replica.service.infer = infer_late  # type: ignore[method-assign]
            request = asyncio.create_task(cluster.infer(stream, make_batch(stream, 1)))
            await reached.wait()
            cluster.start("r1")
            await cluster.until(lambda: replica._pending is not None)
            await asyncio.sleep(0.1)
            assert set(cluster.coordinator.view.members) == {"r0"}
            proceed.set()
            assert (await request)[1]["parameters"]["update"] == 2
            await cluster.until_members("r0", "r1")
            assert (await cluster.infer(stream, make_batch(stream, 2)))[1]["parameters"]["update"] == 3
            assert list(cluster.replicas["r1"].service.store.slots) == [stream]

    asyncio.run(run())


def test_the_coordinator_may_be_restarted(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, path, num_replicas=2, lease=3.0) as cluster:

            async def disturb() -> None:
                before = cluster.coordinator.view
                cluster.tasks["coordinator"].cancel()
                if cluster.coordinator._lock:
                    cluster.coordinator._lock.release()
                cluster.start_coordinator()
                assert cluster.coordinator.view.epoch > before.epoch
                assert cluster.coordinator.view.members == before.members
                cluster.start("r2")
                await cluster.until_members("r0", "r1", "r2")

            histories = await run_load(cluster, tmp_path, 9, disturb)
            assert all(history.batches == list(range(9)) for history in histories.values())

    asyncio.run(run())


def test_streams_that_cannot_be_saved_do_not_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctta.serve.cluster.coordinator.RETRY_SECONDS", 0.5)

    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1) as cluster:
            for stream in STREAMS:
                await cluster.infer(stream, make_batch(stream, 0))
            snapshots = cluster.replicas["r0"].service.factory.snapshots
            write = snapshots.write

            def fail(_stream: object) -> None:
                raise OSError(28, "No space left on device")

            snapshots.write = fail  # type: ignore[assignment]
            cluster.start("r1")
            await cluster.until(lambda: "could not be handed over" in caplog.text)
            for stream in STREAMS:  # as before, with what they have learned
                status, answer = await cluster.infer(stream, make_batch(stream, 1))
                assert (status, answer["parameters"]["update"]) == (200, 2)
            snapshots.write = write  # type: ignore[method-assign]
            await cluster.until_members("r0", "r1")
            for stream in STREAMS:
                status, answer = await cluster.infer(stream, make_batch(stream, 2))
                assert (status, answer["parameters"]["update"]) == (200, 3)

    asyncio.run(run())


def test_the_front_merges_lists_metrics_and_readiness(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path) as cluster:
            for stream in STREAMS:
                await cluster.infer(stream, make_batch(stream, 0))
            listed = json.loads((await cluster.call("GET", "/streams", query=b"order=name&offset=1&limit=3")).body)
            assert [each["name"] for each in listed["streams"]] == STREAMS[1:4]
            assert (listed["total"], listed["matching"], listed["totals"]["images"]) == (5, 5, 30)
            text = (await cluster.call("GET", "/metrics")).body.decode()
            values = [line.split()[-1] for line in text.splitlines() if line.startswith("ctta_streams{")]
            assert len(values) == 3 and sum(map(float, values)) == 5
            assert text.count("# HELP ctta_streams ") == 1
            assert (await cluster.call("GET", "/v2/health/ready")).status == 200
            shown = await cluster.call("GET", "/streams/camera3")
            assert json.loads(shown.body)["updates"] == 1
            body = gzip.compress(json.dumps(infer_request("camera3", make_batch("camera3", 1))).encode())
            compressed = [(b"host", b"localhost"), (b"content-encoding", b"gzip")]
            request = HttpRequest("POST", "/v2/models/ctta/infer", b"", compressed, body)
            answer = json.loads((await call_app(cluster.app, request)).body)
            assert answer["parameters"] == {**answer["parameters"], "sequence_id": "camera3", "update": 2}
            cluster.replicas["r1"].service.store.is_closed = True
            assert (await cluster.call("GET", "/v2/models/ctta/ready")).status == 503
            assert (await cluster.call("GET", "/streams/nobody")).status == 404
            assert (await cluster.call("GET", "/")).body.startswith(b"<!doctype html>")
            assert (await cluster.call("POST", "/v2/models/ctta/infer", body=b"{")).status == 400
            assert (await cluster.call("GET", "/streams", query=b"limit=0")).status == 400

    asyncio.run(run())


def test_tokens_are_checked_before_a_body_is_read(tmp_path: Path) -> None:
    tokens = Tokens("i" * 20, "a" * 20)

    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1, tokens=tokens) as cluster:
            body = json.dumps(infer_request("a", make_batch("a", 0))).encode()
            for token, status in ((None, 401), ("x" * 20, 401), (tokens.infer, 200), (tokens.admin, 200)):
                assert (await cluster.call("POST", "/v2/models/ctta/infer", body=body, token=token)).status == status
            assert (await cluster.call("POST", "/streams/a/image", body=b"x" * 2**25)).status == 401
            for token, status in ((None, 401), (tokens.infer, 403), (tokens.admin, 200)):
                assert (await cluster.call("POST", "/streams/a/reset", token=token)).status == status
            for path, status in (("/streams", 401), ("/metrics", 401), ("/cluster", 401), ("/v2/health/ready", 200)):
                assert (await cluster.call("GET", path)).status == status
            assert (await cluster.call("GET", "/streams/a/../a")).status == 401

    asyncio.run(run())


def test_a_store_of_fsspec_gets_the_audit_log_and_the_settings(tmp_path: Path) -> None:
    path = f"memory://{uuid.uuid4().hex}"

    async def run() -> None:
        async with local_cluster(tmp_path, path, num_replicas=1, lease=2.0) as cluster:
            await cluster.infer("a", make_batch("a", 0))
            files, state = SharedFiles(path), cluster.replicas["r0"].state
            async with asyncio.timeout(30.0):
                while not (content := files.read(state.audit_file.name)):
                    await asyncio.sleep(0.05)
            assert json.loads(content)["kind"] == "new"
            assert json.loads(files.read("service.json") or b"")["method"] == "Tent"
            other = SharedState(path, "other")
            assert (other.path / "service.json").exists()  # what --method defaults to
            other.release()

    asyncio.run(run())


def test_a_view_that_cannot_be_recorded_does_not_take_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.serve.cluster.coordinator.RETRY_SECONDS", 0.05)

    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1) as cluster:
            await cluster.infer(STREAMS[0], make_batch(STREAMS[0], 0))
            write, num_failures = cluster.coordinator._files.write, 0

            def fail(*_arguments: object) -> None:
                nonlocal num_failures
                num_failures += 1
                raise OSError(28, "No space left on device")

            cluster.coordinator._files.write = fail  # type: ignore[assignment]
            cluster.start("r1")
            await cluster.until(lambda: num_failures > 2)
            assert set(cluster.coordinator.view.members) == {"r0"}
            cluster.coordinator._files.write = write  # type: ignore[method-assign]
            await cluster.until_members("r0", "r1")
            assert (await cluster.infer(STREAMS[0], make_batch(STREAMS[0], 1)))[1]["parameters"]["update"] == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", 2], "need --ray"),
        (["--state", "s3://bucket/streams"], "need --ray"),
        (["--ray", "auto"], "--ray needs --state"),
        (["--ray", "auto", "--state", "x", "--source", "a=/dev/video0"], "--source needs one process"),
    ],
)
def test_options_that_contradict_each_other(options: list[object], message: str) -> None:
    assert message in user_error(serve, "--model", "embedded", *options)
