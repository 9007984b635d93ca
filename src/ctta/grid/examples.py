"""Scenes to look at, one method after the other, once the cells of a table are there."""

from pathlib import Path

from ctta.grid.run import Run
from ctta.label_maps import write_examples
from ctta.metrics import MIOU
from ctta.recipes import build
from ctta.results import read_result

FOLDER = "examples"


def keep_examples(run: Run) -> None:
    """Write each method's best and worst change into the run's folder, for the report.

    Nothing is written where results are of images, or where the network as trained is not among them. Of a method with
    several orders and seeds, the first cell is looked at.
    """
    complete = [cell for cell in run.cells if cell.is_complete]
    sources = {cell.order: cell for cell in complete if cell.row == "source"}
    looked_at = set()
    for cell in complete:
        if cell.row == "source" or cell.row in looked_at or cell.order not in sources:
            continue
        looked_at.add(cell.row)
        result = read_result(Path(cell.folder))
        if result.measure != MIOU:
            return
        stream = build(cell.recipe, cell.options).stream(cell.order)
        source = Path(sources[cell.order].folder)
        write_examples(result.method, Path(cell.folder), source, stream, run.folder / FOLDER)
