"""Scenes to look at, one method after the other, once the cells of a table are there."""

from pathlib import Path

from ctta.benchmark.recipes import build
from ctta.benchmark.run import Run
from ctta.evaluation.label_maps import write_examples
from ctta.evaluation.label_maps.example import FOLDER
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result, read_result


def keep_examples(run: Run) -> None:
    """Write each method's best and worst change into the run's folder, for the report, in place of earlier ones.

    All cells of the folder count, also those that an earlier command filled. Nothing is written where results are of
    images, or where the network as trained is not among them. Of a method with several orders and seeds, the first is
    looked at.
    """
    examples = run.folder / FOLDER
    for earlier in examples.glob("*.npz"):  # perhaps of a seed that is not the first any more
        earlier.unlink()
    task = build(run.cells[0].recipe, run.cells[0].options)
    results = _results_of_pixels(run.folder / "cells")
    sources = {_seen(result): cell for cell, result in results if result.labels["row"] == "source"}
    looked_at = {"source"}
    for cell, result in results:
        row, source = result.labels["row"], sources.get(_seen(result))
        if row in looked_at or source is None:
            continue
        stream = task.stream(result.labels["order"])
        if stream.hash == result.stream_hash:  # else the scenes that the cell saw are not there any more
            looked_at.add(row)
            write_examples(result.method, cell, source, stream, examples)


def _results_of_pixels(cells: Path) -> list[tuple[Path, Result]]:
    """The complete ones, the first order and seed of each method first."""
    found = []
    for about in cells.glob("*/about.json"):
        try:
            result = read_result(about.parent)
        except (ValueError, TypeError, KeyError):  # whatever a damaged file may give; the report names such a cell
            continue
        if result.is_complete and result.measure == MIOU:
            found.append((about.parent, result))
    return sorted(found, key=lambda pair: [pair[1].labels[name] or 0 for name in ("order", "seed")])


def _seen(result: Result) -> tuple[str, str]:
    """Two results with the same network and stream compare."""
    return result.source, result.stream_hash
