"""Random faults against a service, in the short form of benchmarks/chaos.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_service_keeps_its_promises_under_random_faults() -> None:
    """One round or more of each fault, followed by a kill and a restart."""
    command = [sys.executable, str(ROOT / "benchmarks/chaos.py"), "--seconds", "5", "--streams", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {line[:34].strip(): int(line[34:]) for line in result.stdout.splitlines()[1:]}
    assert counts["updates lost"] == 0 and counts["status 200"] > 0
    assert all(counts[fault] >= 1 for fault in ("kill -9", "full disk", "failing network", "bad requests"))
