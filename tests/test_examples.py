"""The examples and notebooks run; notebooks are stored without outputs, and open in Colab."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pytest

import ctta

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


def compile_cell(source: str) -> tuple[CodeType, CodeType | None]:
    """Return the statements of a cell, and its last expression, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    shown = compile(ast.Expression(last.value), "cell", "eval") if isinstance(last, ast.Expr) else None
    return compile(tree, "cell", "exec"), shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code" or "install" in cell.metadata.get("tags", ()):
            continue
        statements, shown = compile_cell(cell.source)
        exec(statements, names)
        if shown is not None:
            value = eval(shown, names)
            assert value._repr_html_() if hasattr(type(value), "_repr_html_") else repr(value)
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_opens_in_colab(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, install, *rest = notebook.cells
    assert f"/ctta/blob/main/notebooks/{path.name})" in first.source
    assert install.source.startswith("%pip install ") and "git+https://github.com/ctta-project/ctta" in install.source
    assert all(not cell.outputs and cell.execution_count is None for cell in [install, *rest] if "outputs" in cell)


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
