"""Snapshots that several replicas share, of which only the newest owner of a stream can replace one.

The number of a snapshot starts with the epoch since which its writer owns the stream, and the highest number counts. A
new owner moves the newest snapshot to its own epoch before it reads it, so whatever a former owner writes later has a
lower number: a replica that was thought dead, or was paused in the middle of a write, overwrites nothing.
"""

import os
import shutil
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from ctta.errors import DamagedCheckpointError
from ctta.serve.persistence import (
    DAMAGED,
    STATE_FILE,
    UNFINISHED,
    WINDOW_FILE,
    Snapshots,
    directory_name,
    parse_directory_name,
)
from ctta.serve.stream import ServedStream

EPOCH = 10**9  # snapshots of one owner
COMPLETE = "complete"  # written last
CLAIM_ATTEMPTS = 20


class OwnershipLostError(OSError):
    """A stream has a newer owner, so this replica must not save it."""


class FencedSnapshots(Snapshots):
    """Snapshots in a folder that several processes share, each with streams of its own.

    Args:
        directory: Where the streams are kept.
        owns: Returns whether this process owns a stream.
        may_write: Returns whether this process still has the lease without which it must not write.

    Attributes:
        epoch: Epoch of the current view; a stream that is claimed now is owned since then.
        lost: Streams for which there turned out to be a newer owner.
    """

    def __init__(self, directory: Path, owns: Callable[[str], bool], may_write: Callable[[], bool]) -> None:
        self.epoch, self.lost, self._owns, self._may_write = 0, set[str](), owns, may_write
        self._epochs: dict[str, int] = {}  # since when each stream is owned
        super().__init__(directory)

    def _remove_leftovers(self) -> None:
        """Remove nothing: what looks like a leftover may be what another process is writing."""

    def names(self) -> Iterator[str]:
        """Yield every stream that has a snapshot and that this process owns."""
        return filter(self._owns, super().names())

    def start_epoch(self, epoch: int, held: Container[str]) -> None:
        """Take over the epoch of a new view.

        Args:
            epoch: The epoch.
            held: Streams that this process had before and still has; others that it owns are claimed anew.
        """
        self.epoch = epoch
        for name in [name for name in {*self._epochs, *self.lost} if name not in held]:
            self.release(name)

    def release(self, name: str) -> None:
        """Give up a stream; the next access claims it again."""
        self._epochs.pop(name, None)
        self.lost.discard(name)

    def write(self, stream: ServedStream) -> None:
        """Replace the snapshot of a stream; OwnershipLostError if it has a newer owner."""
        super().write(stream)
        self._check_owner(stream.name)  # it may have come while this snapshot was written

    def delete(self, name: str) -> None:
        """Delete the snapshot of a stream; OwnershipLostError if it has a newer owner."""
        # Nothing is left to tell a former owner of the newer epoch, so there its lease alone prevents a late write.
        self._check_owner(name)
        super().delete(name)
        self.release(name)

    def quarantine(self, name: str) -> Path:
        """Move a stream that cannot be read out of the way; OwnershipLostError if it has a newer owner."""
        self._check_owner(name)
        return super().quarantine(name)

    def _next_number(self, name: str) -> int:
        newest, epoch = self._check_owner(name), self._epochs[name]
        return max(newest + 1, epoch * EPOCH)

    def _publish(self, unfinished: Path, parent: Path, number: int) -> None:
        self._check_lease()
        super()._publish(unfinished, parent, number)
        for leftover in parent.glob(f"{UNFINISHED}*"):  # of a former owner that ended while it wrote
            if int(leftover.name.removeprefix(UNFINISHED)) < number:
                shutil.rmtree(leftover, ignore_errors=True)

    def state_file(self, name: str) -> Path:
        """Return the file of a stream's model, which becomes this owner's."""
        self._claim(name)
        return super().state_file(name)

    def read_summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a stream as of its snapshot; DamagedCheckpointError if it cannot be read."""
        self._claim(name)  # or a former owner might replace it at the same time
        return super().read_summary(name)

    def _check_lease(self) -> None:
        if not self._may_write():
            raise OwnershipLostError("this replica has lost its lease, and must not write until it has a new one")

    def _check_owner(self, name: str) -> int:
        """Return the highest number of a stream's snapshots, -1 if there is none; raise if it is a newer owner's."""
        self._check_lease()
        epoch = self._epochs.setdefault(name, self.epoch)
        newest = max(self._stored_numbers(name), default=-1)
        if newest >= (epoch + 1) * EPOCH:
            self.lost.add(name)
            raise OwnershipLostError(
                f"stream {name} has a newer owner, of epoch {newest // EPOCH} and not {epoch}: another service uses "
                "the same state, or this replica was cut off"
            )
        return newest

    def _claim(self, name: str) -> None:
        """Move the newest snapshot to the epoch of this owner."""
        for _ in range(CLAIM_ATTEMPTS):
            newest = self._check_owner(name)
            first = self._epochs[name] * EPOCH
            if newest < 0 or newest >= first:
                return
            try:
                self._move(name, newest, first)
                return
            except FileNotFoundError:  # a former owner has just replaced it by another one
                time.sleep(0.05)
        raise OSError(f"the snapshots of stream {name} change all the time: is another service using them?")

    # ---- what differs between a folder and other stores ----

    def _stored_numbers(self, name: str) -> set[int]:
        return self._numbers(self.directory / directory_name(name))

    def _move(self, name: str, number: int, to: int) -> None:
        parent = self.directory / directory_name(name)
        os.rename(parent / str(number), parent / str(to))  # not flushed: after a power failure, either name will do


class RemoteSnapshots(FencedSnapshots):
    """Snapshots in any store that fsspec opens; files are written and read in a local folder on the way.

    Args:
        filesystem: File system of fsspec.
        root: Where the streams are kept in it.
        scratch: Local folder.
        owns: Returns whether this process owns a stream.
        may_write: Returns whether this process still has the lease without which it must not write.
    """

    def __init__(
        self,
        filesystem: Any,
        root: str,
        scratch: Path,
        owns: Callable[[str], bool],
        may_write: Callable[[], bool],
    ) -> None:
        self._filesystem, self._root = filesystem, root.rstrip("/")
        filesystem.makedirs(self._root, exist_ok=True)
        super().__init__(scratch, owns, may_write)

    def names(self) -> Iterator[str]:
        """Yield every stream that has a snapshot and that this process owns."""
        found = {path.split("/")[-3] for path in self._list(self._root) if path.endswith(f"/{COMPLETE}")}
        names = (parse_directory_name(name) for name in sorted(found))
        return iter([name for name in names if name and self._owns(name)])

    def restore(self, stream: ServedStream) -> None:
        """Restore the window and the history of a stream whose model was loaded; DamagedCheckpointError on failure."""
        try:
            super().restore(stream)
        finally:
            self._forget_local(stream.name)

    def read_summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a stream as of its snapshot; DamagedCheckpointError if it cannot be read."""
        before = self._stored_numbers(name)
        try:
            # Without a claim, which copies: only of streams that are used.
            return Snapshots.read_summary(self, name)
        except DamagedCheckpointError:
            if self._stored_numbers(name) == before:
                raise
            return self.read_summary(name)  # a former owner has just replaced it
        finally:
            self._forget_local(name)

    def delete(self, name: str) -> None:
        """Delete the snapshot of a stream; OwnershipLostError if it has a newer owner."""
        for number in self._stored_numbers(name):
            self._check_owner(name)
            self._remove(name, number)
        self._forget_local(name)
        self.release(name)

    def quarantine(self, name: str) -> Path:
        """Move a stream that cannot be read out of the way; OwnershipLostError if it has a newer owner."""
        self._check_owner(name)
        target = f"{self._root}/{DAMAGED}{time.time_ns()}-{directory_name(name)}"
        for path in self._list(self._parent(name)):
            self._filesystem.copy(path, target + path.removeprefix(self._parent(name)))
        for number in self._stored_numbers(name):
            self._remove(name, number)
        return Path(target)

    def _parent(self, name: str) -> str:
        return f"{self._root}/{directory_name(name)}"

    def _list(self, path: str) -> list[str]:
        """Return all files below a path, also those that another process has just written."""
        self._filesystem.invalidate_cache()
        root = self._filesystem._strip_protocol(path)
        return [str(found) for found in self._filesystem.find(root)]

    def _stored_numbers(self, name: str) -> set[int]:
        markers = (path.split("/")[-2:] for path in self._list(self._parent(name)))
        return {int(number) for number, file_name in markers if file_name == COMPLETE and number.isdecimal()}

    def _publish(self, unfinished: Path, parent: Path, number: int) -> None:
        name = parse_directory_name(parent.name)
        assert name
        for file_name in (STATE_FILE, WINDOW_FILE):
            self._filesystem.put_file(str(unfinished / file_name), f"{self._parent(name)}/{number}/{file_name}")
        self._check_lease()
        self._filesystem.pipe_file(f"{self._parent(name)}/{number}/{COMPLETE}", b"")
        for older in self._stored_numbers(name):
            if older < number:
                self._remove(name, older)

    def _move(self, name: str, number: int, to: int) -> None:
        for file_name in (STATE_FILE, WINDOW_FILE, COMPLETE):
            self._filesystem.copy(
                f"{self._parent(name)}/{number}/{file_name}", f"{self._parent(name)}/{to}/{file_name}"
            )

    def _remove(self, name: str, number: int) -> None:
        for file_name in (COMPLETE, STATE_FILE, WINDOW_FILE):  # the marker first: a kill leaves no partial snapshot
            path = f"{self._parent(name)}/{number}/{file_name}"
            if self._filesystem.exists(path):
                self._filesystem.rm_file(path)

    def _find_file(self, name: str, file_name: str) -> Path:
        numbers = self._stored_numbers(name)
        if not numbers:
            raise FileNotFoundError(f"there is no snapshot in {self._parent(name)}")
        path = self.directory / directory_name(name) / str(max(numbers)) / file_name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{file_name}.partial")  # a download that breaks off must not look like damage
            self._filesystem.get_file(f"{self._parent(name)}/{max(numbers)}/{file_name}", str(partial))
            partial.replace(path)
        return path

    def _forget_local(self, name: str) -> None:
        shutil.rmtree(self.directory / directory_name(name), ignore_errors=True)
