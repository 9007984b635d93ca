"""Faults with and without guards: TENT and CoTTA on the embedded task, each stream once, nothing chosen on it.

    python benchmarks/guard_report.py run --work FOLDER     # goes on where it was stopped
    python benchmarks/guard_report.py show --work FOLDER    # docs/results/guards/: JSON, table and pictures

The streams are of the 2,000 images and fifteen corruptions of the reported tables. Faults: a learning rate of 30 times
the usual one; images sorted by class within each corruption; 20 batches of pure noise before the sixth corruption; ten
rounds. Every batch is a line of JSON in the folder, and every cell (stream, method, guard) a file of its own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guard_methods import BATCH_SIZE, method
from torch import Tensor

import ctta
from ctta.base import AdaptiveModel
from ctta.datasets import sample
from ctta.guard import Guarded
from ctta.streams import Stream, continual, rounds

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "guards"
NUM_ROUNDS, NOISE_BATCHES, NOISE_BEFORE = 10, 20, 5
STREAMS = ("healthy", "rate x30", "sorted by class", "noise burst", "ten rounds")
METHODS = ("tent", "cotta")
ROWS = ("source", *(f"{name}{guard}" for name in METHODS for guard in ("", " guarded")))


def corrupted(stream: str, images: int) -> Stream:
    """The corruptions in the standard order; a tenth of the images for each of ten rounds."""
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


def batches(stream: str, images: int) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """Inputs, labels (None for noise) and the number of the segment."""
    data = corrupted(stream, images)
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(data):
        segment = data.segment_index(number)
        if stream == "noise burst" and segment == NOISE_BEFORE and data.segment_index(number - 1) < NOISE_BEFORE:
            for _ in range(NOISE_BATCHES):
                yield torch.rand(batch.x.shape, generator=generator), None, segment
        yield batch.x, batch.y, segment


def model_of(row: str, stream: str) -> AdaptiveModel:
    if row == "source":
        return ctta.Source(ctta.models.embedded())
    name, _, guard = row.partition(" ")
    bare = method(name, 30.0 if stream == "rate x30" else 1.0)
    return Guarded(bare) if guard else bare


def run_cell(work: Path, stream: str, row: str, images: int) -> None:
    """All lines of a cell; a saved stream beside them says where to go on."""
    lines, state = (work / f"{stream}-{row}.{ending}".replace(" ", "_") for ending in ("jsonl", "safetensors"))
    done = lines.read_text().splitlines() if lines.exists() else []
    model = model_of(row, stream)
    if state.exists():
        model = ctta.load(state, ctta.models.embedded())
        done = done[: model.num_steps]  # a line without its state is computed again
    else:
        done = []
    with lines.open("w") as file:
        file.writelines(line + "\n" for line in done)
        for number, (x, y, segment) in enumerate(batches(stream, images)):
            if number < len(done):
                continue
            before = len(model.events) if isinstance(model, Guarded) else 0
            answers = model(x).argmax(1)
            wrong = None if y is None else (answers != y).double().mean().item()  # noise has no right answer
            line: dict[str, Any] = {"segment": segment, "error": wrong, "events": []}
            if isinstance(model, Guarded):
                line |= {"events": [event.kind for event in model.events[before:]], "score": model.collapse_score}
            file.write(json.dumps(line) + "\n")
            file.flush()
            ctta.save(model, state)


def run(work: Path, images: int) -> None:
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    for row in ROWS:  # the quick ones first
        for stream in STREAMS:
            marker = work / f"{stream}-{row}.done".replace(" ", "_")
            if not marker.exists():
                run_cell(work, stream, row, images)
                marker.touch()
                print(f"{stream}, {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults with and without guards.")
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--work", type=Path, required=True, help="folder for what was computed")
    parser.add_argument("--images", type=int, default=200, help="of each corruption")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.work, arguments.images)
    else:
        from draw_guard_report import show

        show(arguments.work, RESULTS)


if __name__ == "__main__":
    main()
