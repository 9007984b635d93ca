"""Random faults against a service, in the short form of benchmarks/chaos/run.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_service_keeps_its_promises_under_random_faults() -> None:
    """Faults at random times, on top of each other, and a kill amid them; the script checks the promises."""
    options = ["--seconds", "4", "--streams", "2", "--round", "6"]
    command = [sys.executable, "-m", "benchmarks.chaos.run", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {line[:34].strip(): int(line[34:]) for line in result.stdout.splitlines()[1:-1]}
    assert counts["updates lost"] == 0 and counts["updates acknowledged"] > 0
    faults = ("full disk", "failing network", "bad requests", "clients that leave", "clients that do not read")
    assert counts["slow requests"] >= 1
    assert counts["kill -9"] >= 1 and all(counts[fault] >= 1 for fault in faults)
