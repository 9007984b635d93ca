"""The state that the replicas of a service share: a folder, or any path that fsspec opens."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from ctta.core.model import AdaptiveModel
from ctta.io.atomic import atomic_write
from ctta.serve.cluster.snapshots import FencedSnapshots, RemoteSnapshots
from ctta.serve.directory import StateDirectory, check_same_service, lock_directory

SERVICE_FILE, CLUSTER_FILE = "service.json", "cluster.json"


def is_url(path: str) -> bool:
    """Return whether a path is one for fsspec, such as ``s3://bucket/folder``.

    >>> is_url("s3://bucket/streams"), is_url("/srv/streams")
    (True, False)
    """
    return "://" in path


class SharedFiles:
    """Small files of the shared state.

    Args:
        path: A folder that every machine sees under this path, or a URL for fsspec.

    Raises:
        ImportError: If fsspec, or what it needs for the URL, is not installed.
    """

    def __init__(self, path: str) -> None:
        self.path, self.filesystem, self.root = path, None, path
        if is_url(path):
            try:
                import fsspec
            except ImportError as error:
                raise ImportError(f"{path} needs the extra 'serve-ray': pip install 'ctta[serve-ray]'") from error
            self.filesystem, self.root = fsspec.core.url_to_fs(path)
            self.filesystem.makedirs(self.root, exist_ok=True)
        else:
            Path(path).mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        try:
            if self.filesystem is None:
                return Path(self.root, name).read_bytes()
            self.filesystem.invalidate_cache()
            content: bytes = self.filesystem.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file, completely or not at all."""
        if self.filesystem is None:
            with atomic_write(Path(self.root, name), durable=True) as temporary:
                temporary.write_bytes(content)
        else:
            self.filesystem.pipe_file(f"{self.root}/{name}", content)

    def lock(self) -> FileLock | None:
        """Lock a folder for the service as a whole; None for a URL, where the epochs alone tell services apart."""
        return None if is_url(self.path) else lock_directory(Path(self.root))


class SharedState(StateDirectory):
    """The state as one replica uses it, next to others that use the same.

    Args:
        path: A folder that every machine sees under this path, or a URL for fsspec.
        replica: Name for the audit log of this replica.
        owns: Returns whether this replica owns a stream.
        may_write: Returns whether this replica has a lease.
    """

    def __init__(
        self,
        path: str,
        replica: str,
        *,
        owns: Callable[[str], bool] = lambda _stream: False,
        may_write: Callable[[], bool] = lambda: False,
    ) -> None:
        self.files, self.replica, self._owns, self._may_write = SharedFiles(path), replica, owns, may_write
        self._scratch = tempfile.mkdtemp(prefix="ctta-replica-") if is_url(path) else None
        self.path = Path(self._scratch or path)
        self._uploaded: dict[Path, int] = {}  # when each file had changed
        if self._scratch and (recorded := self.files.read(SERVICE_FILE)):
            (self.path / SERVICE_FILE).write_bytes(recorded)

    @property
    def audit_file(self) -> Path:
        """File of the audit log of this replica."""
        return self.path / f"audit-{self.replica}.jsonl"

    def check_same_service(self, model: AdaptiveModel) -> None:
        """Raise ConfigError if the streams were started with another network or method."""
        check_same_service(self.path, model)
        if self._scratch and self.files.read(SERVICE_FILE) is None:
            self.files.write(SERVICE_FILE, (self.path / SERVICE_FILE).read_bytes())

    def open_snapshots(self) -> FencedSnapshots:
        """Return the snapshots of the streams, of which this replica sees those that it owns."""
        if self.files.filesystem is None:
            return FencedSnapshots(self.path / "streams", self._owns, self._may_write)
        root = f"{self.files.root}/streams"
        return RemoteSnapshots(self.files.filesystem, root, self.path / "streams", self._owns, self._may_write)

    def upload_audit_log(self) -> None:
        """Copy the audit log, and the file before it, to where the streams are, if that is not a folder."""
        for file in (self.audit_file, self.audit_file.with_name(f"{self.audit_file.name}.1")):
            if self._scratch and file.exists() and (changed_at := file.stat().st_mtime_ns) != self._uploaded.get(file):
                self.files.write(file.name, file.read_bytes())
                self._uploaded[file] = changed_at

    def release(self) -> None:
        """Copy what is left to copy, and remove the local folder."""
        if self._scratch:
            self.upload_audit_log()
            shutil.rmtree(self._scratch, ignore_errors=True)


def read_cluster(files: SharedFiles) -> dict[str, Any]:
    """Return what the coordinator recorded; empty if there is nothing."""
    content = files.read(CLUSTER_FILE)
    return {} if content is None else dict(json.loads(content))


def write_cluster(files: SharedFiles, record: dict[str, Any]) -> None:
    """Record what the coordinator needs after a restart."""
    files.write(CLUSTER_FILE, json.dumps(record, indent=1).encode())
