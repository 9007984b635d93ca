"""Measure what remembered states bring: at the second visit of a domain, and for a second camera.

    python benchmarks/recall_states.py [--methods tent vane] [--out JSON]
    python benchmarks/recall_states.py --hold-out CIFAR10 [--tolerance 0.1 0.2 0.4] [--max-confidence 0.9 1]

Each method runs with and without the policy ``recall`` on the same batches of 50. Its settings were chosen with
``--hold-out``, which takes CIFAR-10 test images 2,000 to 9,999 under the four hold-out corruptions; the reported
streams have the images that come with the library under every other of the fifteen corruptions of the benchmark.

Intervals are of the difference between the two, paired by batch, at 90 %.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cifar10_files import read_split
from hold_out import FIRST_IMAGE

import ctta
from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT
from ctta.data.datasets import Corrupted, sample
from ctta.data.streams import Batch, Segment, Stream
from ctta.policies.recalling import Recall

BATCH_SIZE, VISIT_SIZE, SEVERITY = 50, 200, 5
NUM_CLEAN = 2000
QUANTILE = 1.645  # of the normal distribution, for intervals at 90 %


class Streams(NamedTuple):
    """The streams of one dataset; each visit, and the second camera, have images of their own."""

    visits: list[Stream]
    camera: Stream
    others: dict[str, Stream]


def make_streams(data: Corrupted, names: Sequence[str]) -> Streams:
    """Return two visits of every corruption, a second camera that sees them too, and streams that should not change."""
    labels = np.asarray(data.labels)
    visits = [
        Stream(
            f"visit {number}",
            [Segment(name, data.domain(name, SEVERITY), _take(number)) for name in names],
            batch_size=BATCH_SIZE,
        )
        for number in range(3)
    ]
    rows = np.arange(2 * VISIT_SIZE)
    by_class = rows[np.argsort(labels[rows], kind="stable")]
    clean, first = data.combine(), data.domain(names[-1], SEVERITY)
    others = {
        "clean": Stream("clean", [Segment("clean", clean, np.arange(NUM_CLEAN))], batch_size=BATCH_SIZE),
        "clean, sorted": Stream("sorted", [Segment("clean", clean, by_class)], batch_size=BATCH_SIZE),
        f"{names[-1]}, sorted": Stream("sorted", [Segment(names[-1], first, by_class)], batch_size=BATCH_SIZE),
    }
    return Streams(visits[:2], visits[2], others)


def _take(number: int) -> Any:
    return np.arange(number * VISIT_SIZE, (number + 1) * VISIT_SIZE)


def score(model: ctta.AdaptiveModel, batches: Iterable[Batch]) -> list[float]:
    """Return the error of each batch in percent."""
    errors = []
    for batch in batches:
        assert batch.y is not None
        errors.append(100 * float((model(batch.x).argmax(1) != batch.y).float().mean()))
    return errors


def compare(with_recall: Sequence[float], without: Sequence[float]) -> dict[str, float]:
    """Return both mean errors, and their difference with the half width of its interval."""
    differences = np.subtract(with_recall, without)
    half = QUANTILE * differences.std(ddof=1) / len(differences) ** 0.5
    return {
        "without": float(np.mean(without)),
        "with": float(np.mean(with_recall)),
        "difference": float(differences.mean()),
        "half_width": float(half),
        "num_batches": len(differences),
    }


def measure(method: str, streams: Streams, policy: Recall) -> dict[str, dict[str, float]]:
    """Return the comparisons of one method."""
    net = ctta.models.embedded()

    def build(library: ctta.StateLibrary | None = None) -> tuple[ctta.AdaptiveModel, ctta.AdaptiveModel]:
        recalling, plain = ctta.adapt(net, method, policies=[policy]), ctta.adapt(net, method)
        if library is not None:
            library.lend(recalling)
        return recalling, plain

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        library, models = ctta.StateLibrary(folder), build()
        for visit, name in zip(streams.visits, ("first visit", "second visit"), strict=True):
            found[name] = compare(*(score(model, visit) for model in models))
            _report(method, name, found[name])
            library.collect(models[0])
        found["second camera"] = compare(*(score(model, streams.camera) for model in build(library)))
        _report(method, "second camera", found["second camera"])
        for name, stream in streams.others.items():  # with everything that the first camera has learned
            found[name] = compare(*(score(model, stream) for model in build(library)))
            _report(method, name, found[name])
    return found


def _report(method: str, name: str, row: dict[str, float]) -> None:
    change = f"{row['difference']:+.2f} ± {row['half_width']:.2f}"
    print(f"{method:6} {name:18} {row['without']:6.2f} {row['with']:6.2f}  {change}", flush=True)


def main() -> None:
    """Parse arguments, run, and write the numbers."""
    parser = argparse.ArgumentParser(description="Measure what remembered states bring.")
    parser.add_argument("--methods", nargs="+", default=["tent", "vane"])
    parser.add_argument("--hold-out", type=Path, metavar="CIFAR10", help="choose on other images and corruptions")
    defaults = ctta.policies.recall()
    parser.add_argument("--tolerance", type=float, nargs="+", default=[defaults.tolerance])
    parser.add_argument("--max-confidence", type=float, nargs="+", default=[defaults.max_confidence])
    parser.add_argument("--out", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.hold_out:
        images, labels = read_split(arguments.hold_out, "test")
        data = Corrupted(images[FIRST_IMAGE:], labels[FIRST_IMAGE:], name="cifar10 test 2000-9999", seed=1)
        streams = make_streams(data, list(HOLD_OUT))
    else:
        streams = make_streams(sample(), list(CORRUPTIONS)[::2])
    numbers: dict[str, Any] = {}
    for tolerance, max_confidence in itertools.product(arguments.tolerance, arguments.max_confidence):
        policy = ctta.policies.recall(tolerance=tolerance, max_confidence=max_confidence)
        for method in arguments.methods:
            print(f"{method}: {policy}", flush=True)
            numbers[f"{method}, tolerance {tolerance:g}, max_confidence {max_confidence:g}"] = measure(
                method, streams, policy
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
