"""The examples and notebooks run; notebooks are stored with their outputs, and open in Colab."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

import ctta
from scripts.notebooks import run_notebook

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Two test workers share the machine.
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path, tmp_path: Path) -> None:
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


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def describe_outputs(cell: Any) -> list[Any]:
    """Return the kinds of what a cell shows; numbers may differ between machines."""
    return [(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails: python scripts/notebooks.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    stored = nbformat.read(path, as_version=4)
    ran = run_notebook(nbformat.read(path, as_version=4))
    assert [describe_outputs(cell) for cell in ran.cells if cell.cell_type == "code"] == [
        describe_outputs(cell) for cell in stored.cells if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_opens_in_colab(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, install, *rest = notebook.cells
    assert f"/ctta/blob/main/notebooks/{path.name})" in first.source
    assert install.source.startswith("%pip install ") and "git+https://github.com/ctta-project/ctta" in install.source
    assert not install.outputs and sum(bool(cell.get("outputs")) for cell in rest) >= 4
    assert any("ctta.adapt(net)" in cell.source or '"vane"' in cell.source for cell in rest)  # the default
    assert path.stat().st_size < 300_000


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["adapt_your_model", "read_a_benchmark", "segmentation"]


def test_models_and_their_health_show_themselves() -> None:
    net = ctta.models.embedded()
    model = ctta.Guarded(ctta.Tent(net))
    num_trained = sum(each.numel() for each in ctta.Tent(net).student.parameters() if each.requires_grad)
    html = model.wrapped._repr_html_()
    assert "<b>TENT</b>" in html and f"{num_trained:,} of " in html and "Adam(lr=0.001)" in html
    assert "nothing" in ctta.Source(net)._repr_html_()
    assert "&lt;b&gt;" in ctta.Source(net, output="<b>")._repr_html_()
    assert "Health: healthy" in model.health._repr_html_()
