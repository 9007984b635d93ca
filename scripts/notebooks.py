"""Run the notebooks, and store what their cells show.

    python scripts/notebooks.py         run all of them, and write them with their outputs

``tests/test_examples.py`` runs them too, and compares what the cells show with what is stored.
"""

import ast
import base64
import io
import os
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
from nbformat.v4 import new_output

FOLDER = Path(__file__).parents[1] / "notebooks"
DOTS_PER_INCH = 50


def run_notebook(notebook: Any) -> Any:
    """Run the cells in order in the working directory, but those that install; store their outputs in the notebook."""
    import matplotlib.pyplot as plt

    plt.close("all")  # figures of others in this process
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook.cells:
        if cell.cell_type != "code" or "install" in cell.metadata.get("tags", ()):
            continue
        number += 1
        cell.execution_count, cell.outputs = number, []
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = _run_cell(cell.source, names)
        if printed.getvalue():
            cell.outputs.append(new_output("stream", name="stdout", text=printed.getvalue()))
        figures = [_draw(plt.figure(figure)) for figure in plt.get_fignums()]
        plt.close("all")
        cell.outputs += [new_output("display_data", {"image/png": png, "text/plain": "<Figure>"}) for png in figures]
        if value is not None and not figures:
            shown = {"text/plain": repr(value)}
            if hasattr(type(value), "_repr_html_"):
                shown["text/html"] = value._repr_html_()
            cell.outputs.append(new_output("execute_result", shown, execution_count=number))
    return notebook


def _run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run the statements of a cell; return the value of its last expression, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def _draw(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Run and write all notebooks."""
    mpl.use("agg")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            notebook = run_notebook(nbformat.read(path, as_version=4))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
