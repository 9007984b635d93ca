"""The examples run, and stay short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Two test workers share the machine.
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text().splitlines()) < 60
    run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, env=ONE_THREAD)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert "Warning" not in run.stderr


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES][:3] == [
        "01_wrap_any_model.py",
        "02_your_own_method.py",
        "03_save_and_resume.py",
    ]
