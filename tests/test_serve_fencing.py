"""Snapshots that replicas share: whatever a former owner does late, only what the newest owner writes counts."""

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from clusters import Handle, local_cluster, make_batch, make_service

from ctta.serve.cluster.messages import HttpRequest
from ctta.serve.cluster.snapshots import FencedSnapshots, OwnershipLostError, RemoteSnapshots
from ctta.serve.cluster.state import SharedFiles, SharedState
from ctta.serve.persistence import StreamFactory

STREAM = "camera0"


@pytest.fixture(params=["folder", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def test_a_replica_that_was_thought_dead_overwrites_nothing_and_answers_nothing(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path, path, lease=2.0) as cluster:
            stream = STREAM
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
            await cluster.expire(former)
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
            stream = STREAM
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


def make_snapshots(path: str, folder: Path, epoch: int) -> tuple[FencedSnapshots, StreamFactory]:
    """Return the snapshots of a replica that owns everything, and what creates its streams."""
    state = SharedState(path, "replica", owns=lambda _: True, may_write=lambda: True)
    factory = make_service(state, folder, 60.0).factory
    assert isinstance(factory.snapshots, FencedSnapshots)
    factory.snapshots.epoch = epoch
    return factory.snapshots, factory


def test_a_stream_that_another_replica_had_meanwhile_is_claimed_anew(tmp_path: Path, path: str) -> None:
    """Also if this one had only looked at it, or had lost it."""
    (one, factory), (other, _) = (make_snapshots(path, tmp_path, epoch) for epoch in (5, 9))
    one.write(factory.create("a"))
    assert one.read_summary("a")["updates"] == 0
    other.state_file("a")
    with pytest.raises(OwnershipLostError):
        one.write(factory.create("a"))
    assert one.lost == {"a"}
    one.start_epoch(7, held={"a"})
    assert one.lost == {"a"}, "as long as it is held"
    one.start_epoch(12, held=())
    one.state_file("a")
    assert one.read_summary("a")["updates"] == 0 and not one.lost
    with pytest.raises(OwnershipLostError):
        other.write(factory.create("a"))


class BreakingFilesystem:
    """Break off the first download in the middle."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem, self.num_downloads = filesystem, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filesystem, name)

    def get_file(self, remote: str, local: str) -> None:
        self.num_downloads += 1
        self._filesystem.get_file(remote, local)
        if self.num_downloads == 1:
            Path(local).write_bytes(Path(local).read_bytes()[:100])
            raise ConnectionResetError("connection reset by peer")


def test_a_download_that_breaks_off_is_not_mistaken_for_damage(tmp_path: Path) -> None:
    snapshots, factory = make_snapshots(f"memory://{uuid.uuid4().hex}", tmp_path, 1)
    assert isinstance(snapshots, RemoteSnapshots)
    snapshots.write(factory.create("a"))
    snapshots._filesystem = BreakingFilesystem(snapshots._filesystem)
    with pytest.raises(ConnectionResetError):
        factory.read("a")
    assert factory.read("a").name == "a"
    assert not list((snapshots.directory / "a").glob("*/*")), "nothing is kept"


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
