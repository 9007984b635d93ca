"""Scenes for the report of a segmentation benchmark: where each method changed the predictions most."""

from pathlib import Path

from ctta.benchmark.plan import BenchmarkRun
from ctta.benchmark.recipes import build_task
from ctta.errors import DataError
from ctta.evaluation.journal import read_result
from ctta.evaluation.label_maps import EXAMPLES, save_examples
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result


def write_run_examples(run: BenchmarkRun) -> None:
    """Write the best and the worst change of each method into the run folder, replacing earlier ones.

    All complete cells of the folder count, also those of earlier calls. Nothing is written for results of image
    classification, or without a result of the source network to compare with. A method with several orders and seeds
    is shown with the first.

    Args:
        run: The run.
    """
    examples = run.folder / EXAMPLES
    for earlier in examples.glob("*.npz"):  # perhaps of a seed that is not the first any more
        earlier.unlink()
    task = build_task(run.cells[0].recipe, run.cells[0].options, ignore_other_settings=True)
    results = _read_pixel_results(run.folder / "cells")
    sources = {_comparison_key(result): cell for cell, result in results if result.labels["row"] == "source"}
    shown = {"source"}
    for cell, result in results:
        method, source = result.labels["row"], sources.get(_comparison_key(result))
        if method in shown or source is None:
            continue
        stream = task.make_stream(result.labels["order"])
        if stream.hash == result.stream_hash:  # else the data have changed since the cell ran
            shown.add(method)
            save_examples(result.method, cell, source, stream, examples)


def _read_pixel_results(cells: Path) -> list[tuple[Path, Result]]:
    """Return the complete segmentation results, those of the first order and seed first."""
    found = []
    for about in cells.glob("*/about.json"):
        try:
            result = read_result(about.parent)
        except DataError:  # the report lists it
            continue
        if result.is_complete and result.metric == MIOU:
            found.append((about.parent, result))
    return sorted(found, key=lambda pair: [pair[1].labels[name] or 0 for name in ("order", "seed")])


def _comparison_key(result: Result) -> tuple[str, str]:
    """Return what two results must share to be compared: the network and the stream."""
    return result.source, result.stream_hash
