"""Streams on several replicas: one owner each, moves with nothing lost, deaths that cost no more than a snapshot."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import Handle, History, LocalCluster, local_cluster, make_batch
from serving import make_tent

from ctta.serve.cluster.replica import Replica
from ctta.serve.cluster.view import View

STREAMS = [f"camera{number}" for number in range(5)]


async def run_load(
    cluster: LocalCluster,
    tmp_path: Path,
    num_batches: int,
    disturb: Callable[[], Awaitable[None]],
    *,
    before: Callable[[], bool] = lambda: True,
) -> dict[str, History]:
    """Send batches to all streams at once, check every answer, and disturb the cluster in the middle.

    Every stream stops after a third of its batches, until a condition holds, and goes on when the disturbance begins.
    """
    histories = {stream: History(make_tent(tmp_path, lr=0.01), stream) for stream in STREAMS}
    arrived, disturbed = asyncio.Barrier(len(STREAMS) + 1), asyncio.Event()

    async def drive(history: History) -> None:
        for number in range(num_batches):
            if number == num_batches // 3:
                await arrived.wait()
                await disturbed.wait()
            status, answer = await cluster.infer(history.stream, make_batch(history.stream, number))
            while status != 200:
                assert status == 503, answer
                history.fail(number)
                await asyncio.sleep(0.05)
                status, answer = await cluster.infer(history.stream, make_batch(history.stream, number))
            history.check(number, answer)

    async def disturb_in_the_middle() -> None:
        await arrived.wait()
        await cluster.until(before)
        disturbed.set()
        await asyncio.sleep(0)  # the next requests are on their way
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
                cluster.kill(victim)
                await cluster.expire(victim)

            histories = await run_load(
                cluster, tmp_path, 15, disturb, before=lambda: stored_updates(cluster, victim) > 0
            )
            orphans = {
                name for name in STREAMS if View(1, dict.fromkeys(["r0", "r1", "r2"], "x")).owner(name) == victim
            }
            for name, history in histories.items():
                assert history.num_lost <= 5, "of the five batches before the kill, one at least was saved"
                assert name in orphans or (history.num_lost == 0 and history.batches == list(range(15)))

    asyncio.run(run())


def stored_updates(cluster: LocalCluster, name: str) -> int:
    """Return the least number of updates in the snapshots of a replica's streams."""
    service = cluster.replicas[name].service
    names = list(service.store.slots)
    if not names or any(slot.num_saved_changes == 0 for slot in service.store.slots.values()):
        return 0
    return min(int((slot.last_summary or {})["updates"]) for slot in service.store.slots.values())


def hold_requests(replica: Replica) -> tuple[asyncio.Event, asyncio.Event]:
    """Let a replica accept requests and go on with them later; return the events of the first one, and to go on."""
    reached, proceed, infer = asyncio.Event(), asyncio.Event(), replica.service.infer

    async def infer_late(*arguments: Any, **options: Any) -> Any:
        reached.set()
        await proceed.wait()
        return await infer(*arguments, **options)

    replica.service.infer = infer_late  # type: ignore[method-assign]
    return reached, proceed


def test_a_request_that_is_being_read_holds_up_the_move_of_its_stream(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1) as cluster:
            stream = next(name for name in STREAMS if View(1, {"r0": "x", "r1": "x"}).owner(name) == "r1")
            await cluster.infer(stream, make_batch(stream, 0))
            replica = cluster.replicas["r0"]
            reached, proceed = hold_requests(replica)
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


def test_a_request_that_outlives_the_lease_of_its_replica_starts_no_stream_over(tmp_path: Path) -> None:
    """The replica forgets its streams and becomes a member again only when the request has ended."""

    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=2, lease=2.0) as cluster:
            stream = STREAMS[0]
            await cluster.infer(stream, make_batch(stream, 0))
            name = cluster.coordinator.view.owner(stream) or ""
            replica = cluster.replicas[name]
            await replica.service.store.save_all()
            reached, proceed = hold_requests(replica)
            late = asyncio.create_task(cluster.infer(stream, make_batch(stream, 1)))
            await reached.wait()
            replica._coordinator = Handle(lambda: None)  # it is cut off for a while
            del cluster.replicas[name]
            await cluster.expire(name)
            await cluster.front.update_view()
            assert (await cluster.infer(stream, make_batch(stream, 2)))[1]["parameters"]["update"] == 2
            incarnation, cluster.replicas[name] = replica.incarnation, replica
            replica._coordinator = cluster.coordinator_handle
            await replica.notify()
            await cluster.until(lambda: replica.incarnation != incarnation)
            await asyncio.sleep(0.1)
            proceed.set()
            assert (await late)[0] == 503
            await cluster.until_members("r0", "r1")
            await cluster.front.update_view()
            status, answer = await cluster.infer(stream, make_batch(stream, 3))
            assert (status, answer["parameters"]["update"]) == (200, 3)

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
