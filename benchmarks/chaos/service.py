"""The service that benchmarks/chaos/run.py attacks, its faults, and when each of them was on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from small_disk import SmallDisk, small_disk

INTERVAL = 1.0  # seconds between two snapshots
NETWORK = """
import os
import torch
from torch import nn

class Faulty(nn.Sequential):
    def forward(self, x):
        if os.path.exists(os.environ.get("CHAOS_FAIL_FILE", "")):
            raise RuntimeError("the network fails")
        return super().forward(x)

def net():
    torch.manual_seed(0)
    return Faulty(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
"""
Kind = Literal["full disk", "failing network", "stopping"]


class Timeline:
    """When each fault was on; the service may be blamed only outside of these times."""

    def __init__(self) -> None:
        self._windows: dict[Kind, list[tuple[float, float]]] = {"full disk": [], "failing network": [], "stopping": []}
        self._lock = threading.Lock()

    @contextmanager
    def during(self, kind: Kind) -> Iterator[None]:
        """Record a fault from before it begins until after it has ended."""
        with self._lock:
            self._windows[kind].append((time.monotonic(), float("inf")))
            number = len(self._windows[kind]) - 1
        try:
            yield
        finally:
            with self._lock:
                self._windows[kind][number] = (self._windows[kind][number][0], time.monotonic())

    def was_on(self, kind: Kind, start: float, end: float) -> bool:
        """Return whether a fault was on at any time between two."""
        with self._lock:
            return any(begun <= end and start <= ended for begun, ended in self._windows[kind])

    def compute_due(self, acknowledged: float) -> float:
        """Return when an update must be on disk: two intervals after it was acknowledged, or after the disk has space.

        A disk that fills within the two intervals of an update may keep it from being written; once there is space
        again, it is due two intervals later.
        """
        due = acknowledged + 2 * INTERVAL
        with self._lock:
            for begun, ended in sorted(self._windows["full disk"]):
                if begun <= due and acknowledged <= ended:
                    due = max(due, ended + 2 * INTERVAL)
        return due


class ChaosService:
    """``ctta serve`` in another process, with its state on a small disk.

    Args:
        folder: A new folder.
        disk: Where the streams are saved.
    """

    def __init__(self, folder: Path, disk: SmallDisk) -> None:
        self.folder, self.disk, self.address, self.timeline = folder, disk, "", Timeline()
        (folder / "network.py").write_text(NETWORK)
        self.spec = f"file:{folder / 'network.py'}:net"
        self.process: subprocess.Popen[str] | None = None
        self.ended_at = 0.0  # when the process was last told to end

    def start(self, max_live: int = 64) -> None:
        """Start, and wait until it listens.

        Args:
            max_live: Streams in memory; the others are moved to disk and back with each request.
        """
        options = ["--model", self.spec, "--method", "tent", "--no-guard", "--window", "0", "--size", "16", "16"]
        options += ["--state", str(self.disk.path / "state"), "--port", "0", "--snapshot-every", str(INTERVAL)]
        options += ["--live-streams", str(max_live)]
        command = [sys.executable, "-c", "from ctta.cli import main; main()", "serve", *options]
        environment = {**os.environ, "CHAOS_FAIL_FILE": str(self.folder / "fail"), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self.process.stdout
        self.address, self.ended_at = self.process.stdout.readline().split()[-1], float("inf")

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        assert self.process and self.process.stdout
        self.ended_at = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(120)
        self.process.stdout.close()
        return code

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave no space for the files of the process."""
        assert self.process
        with self.timeline.during("full disk"):
            self.disk.fill(self.process)
            try:
                yield
            finally:
                self.disk.free(self.process)

    @contextmanager
    def failing_network(self) -> Iterator[None]:
        """Let the network raise."""
        with self.timeline.during("failing network"):
            (self.folder / "fail").touch()
            try:
                yield
            finally:
                (self.folder / "fail").unlink()


@contextmanager
def chaos_service(folder: Path) -> Iterator[ChaosService]:
    """Run a service in a folder; the process is killed at the end if it still runs."""
    with small_disk(folder / "disk") as disk:
        service = ChaosService(folder, disk)
        service.start()
        try:
            yield service
        finally:
            if service.process and service.process.poll() is None:
                service.stop(signal.SIGKILL)
