"""The examples and the README's code run, and the examples stay short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctta.methods import METHODS

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


def test_the_code_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    before = (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),\n"
        "    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10)).eval()\n"
        "stream = source_batches = recent_batches = [torch.rand(8, 3, 16, 16) for _ in range(2)]\n"
        "loader = [(x, torch.arange(8)) for x in stream]\n"
    )
    script = tmp_path / "readme.py"
    script.write_text(before + "\n".join(blocks))
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=ONE_THREAD)
    assert run.returncode == 0, run.stderr


def test_the_readme_and_the_catalog_name_every_method() -> None:
    """A method that is not in the two tables is one that nobody finds."""
    readme, catalog = (ROOT / "README.md").read_text(), (ROOT / "docs" / "methods.md").read_text()
    section = readme[readme.index("## Methods") : readme.index("## Use it with your model")]
    named = set(re.findall(r"`([a-z0-9_]+)`", section[: section.index("`ctta methods`")]))
    assert named == set(METHODS)
    assert f"{len(METHODS)} methods" in section
    assert [cls.__name__ for cls in METHODS.values() if f"`{cls.__name__}`" not in catalog] == []
