"""Random faults against a service, in the short form of benchmarks/chaos/run.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("place", [[], pytest.param(["--ray"], marks=pytest.mark.long)], ids=["one process", "ray"])
def test_a_service_keeps_its_promises_under_random_faults(place: list[str]) -> None:
    """Faults at random times, on top of each other, and a kill amid them; the script checks the promises."""
    options = ["--seconds", "4" if not place else "60", "--streams", "2", "--round", "6", *place]
    command = [sys.executable, "-m", "benchmarks.chaos.run", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=580, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {
        line[:44].strip(): int(line[44:]) for line in result.stdout.splitlines()[1:] if line[44:].strip().isdecimal()
    }
    assert counts["updates lost"] == 0 and counts["updates acknowledged"] > 0
    faults = ("full disk", "failing network", "bad requests", "clients that leave", "clients that do not read")
    assert counts["slow requests"] >= 1
    assert all(counts[fault] >= 1 for fault in (*faults, "silent connections"))
    assert not place or counts["silent connections that were closed"] >= 1
    assert sum(counts[name] for name in counts if name.startswith(("kill", "SIGTERM", "paused"))) >= 1
