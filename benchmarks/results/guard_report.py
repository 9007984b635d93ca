"""Faults with and without guards: TENT and CoTTA on the embedded task, each stream once, nothing tuned on it.

    python -m benchmarks.results.guard_report run --work FOLDER     # resumes after an interruption
    python -m benchmarks.results.guard_report show --work FOLDER    # writes docs/results/guards/: JSON, table and plots

The streams consist of the 2,000 images and fifteen corruptions of the published tables. Faults: a learning rate of 30
times the usual one; images sorted by class within each corruption; 20 batches of pure noise before the sixth
corruption; ten rounds. Every cell (stream, method, guard) has its own file in the folder, a line of JSON per batch.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ctta
from benchmarks.data.guard_methods import BATCH_SIZE, make_method
from ctta.core.model import AdaptiveModel
from ctta.data.datasets import sample
from ctta.data.streams import Stream, continual, rounds
from ctta.guard import Guarded, Monitored

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "guards"
NUM_ROUNDS, NOISE_BATCHES, NOISE_BEFORE = 10, 20, 5
STREAMS = ("healthy", "rate x30", "sorted by class", "noise burst", "ten rounds")
METHODS = ("tent", "cotta")
ROWS = ("source", *(f"{name}{guard}" for name in METHODS for guard in ("", " guarded")))


def corrupted_stream(stream: str, images: int) -> Stream:
    """Return the corruptions in the standard order; with a tenth of the images for each of ten rounds."""
    if stream == "ten rounds":
        return rounds(
            continual(sample(), limit=max(BATCH_SIZE, images // NUM_ROUNDS), batch_size=BATCH_SIZE), NUM_ROUNDS
        )
    plain = continual(sample(), limit=images, batch_size=BATCH_SIZE)
    if stream != "sorted by class":
        return plain
    segments = [
        replace(segment, rows=segment.rows[np.argsort(segment.images.labels[segment.rows], kind="stable")])
        for segment in plain.segments
        if segment.images.labels is not None
    ]
    return plain.with_segments("sorted by class", segments)


def iter_batches(stream: str, images: int) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """Yield inputs, labels (None for noise) and the number of the segment."""
    data = corrupted_stream(stream, images)
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(data):
        segment = data.segment_index(number)
        if stream == "noise burst" and segment == NOISE_BEFORE and data.segment_index(number - 1) < NOISE_BEFORE:
            for _ in range(NOISE_BATCHES):
                yield torch.rand(batch.x.shape, generator=generator), None, segment
        yield batch.x, batch.y, segment


def make_model(row: str, stream: str) -> AdaptiveModel:
    """Return the model of a row of the table."""
    if row == "source":
        return ctta.Source(ctta.models.embedded())
    name, _, guard = row.partition(" ")
    bare = make_method(name, 30.0 if stream == "rate x30" else 1.0)
    return Guarded(bare) if guard else bare


def run_cell(work: Path, stream: str, row: str, images: int) -> None:
    """Write all lines of a cell, from the saved stream beside them on."""
    lines, state = (work / f"{stream}-{row}.{suffix}".replace(" ", "_") for suffix in ("jsonl", "safetensors"))
    done = lines.read_text().splitlines() if lines.exists() else []
    model = make_model(row, stream)
    if state.exists():
        model = ctta.load(state, ctta.models.embedded())
        done = done[: model.num_steps]  # a line without its state is computed again
    else:
        done = []
    with lines.open("w") as file:
        file.writelines(line + "\n" for line in done)
        for number, (x, y, segment) in enumerate(iter_batches(stream, images)):
            if number < len(done):
                continue
            before = len(model.events) if isinstance(model, Monitored) else 0
            classes = model(x).argmax(1)
            error = None if y is None else (classes != y).double().mean().item()  # noise has no labels
            line: dict[str, Any] = {"segment": segment, "error": error, "events": []}
            if isinstance(model, Monitored):
                line |= {"events": [event.kind for event in model.events[before:]], "score": model.collapse_score}
            file.write(json.dumps(line) + "\n")
            file.flush()
            ctta.save(model, state)


def run(work: Path, images: int) -> None:
    """Run all cells that are not finished."""
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    for row in ROWS:  # fast ones first
        for stream in STREAMS:
            marker = work / f"{stream}-{row}.done".replace(" ", "_")
            if not marker.exists():
                run_cell(work, stream, row, images)
                marker.touch()
                print(f"{stream}, {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults with and without guards.")
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the computed cells")
    parser.add_argument("--images", type=int, default=200, help="images of each corruption")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.work, arguments.images)
    else:
        from benchmarks.results.guard_pages import show

        show(arguments.work, RESULTS)


if __name__ == "__main__":
    main()
