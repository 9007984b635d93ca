"""The table of passes that the speed of the methods is measured against."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_bare_passes_is_that_of_the_methods() -> None:
    """Every method has a row, and as many images go forward and back in its step as the row says."""
    command = [sys.executable, "-m", "benchmarks.speed.methods", "--check"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
