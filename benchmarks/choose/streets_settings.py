"""Choose the settings of `CoTTA.segmentation` on scenes and weather that no reported table uses.

    python -m benchmarks.choose.streets_settings --out FILE.json

The table of `ctta bench streets` has fog, night, rain and snow; this search uses other scenes at dusk and in dust (the
split "choose") of three streets (seeds), one scene at a time, with both source networks. A score is the mIoU, averaged
over the conditions and the streets. It was decided before anything ran:

1. the fraction of a scene's statistics in BatchNorm, without learning: the best score of the network that has some;
2. what to average over, without learning: among sets of scales, powers of the entropy that weigh them (0 weighs them
   equally) and thresholds of the gate, the best mean score of both networks; ties go to the earlier value;
3. the loss and the learning rate, with these views in rounds: the best mean score of both networks, of those whose
   last round is not more than 0.2 below the first with either network. The reference's values come first.

TENT on its entropy gets the best of the same learning rates. Scores that the file holds already are not measured again.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ctta
from benchmarks.networks.load import streets_bn
from ctta.data.streams import rounds, streets
from ctta.data.streets import CLASSES
from ctta.io.atomic import atomic_write
from ctta.views import multiscale_flip
from ctta.views.average import ENTROPY_POWER, weigh_by_confidence

NETWORKS = {"streets": ctta.models.streets, "streets-bn": streets_bn}
SEEDS = (0, 1, 2)
FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
SCALE_SETS = {"all": SCALES, "0.75 to 1.25": SCALES[1:4], "1 to 2": SCALES[2:], "flips only": (1.0,)}
POWERS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0)
THRESHOLDS = (0.69, 0.9, 2.0)  # the last one always averages
RATES = (7.5e-6, 1e-4, 1e-3)
LOSSES = ("hard", "cross_entropy")
MAX_DECAY = 0.2  # mIoU in percent, from the first round to the last

Scores = dict[str, float]


class Confusions:
    """Confusion matrices of several predictions of the same scenes, by name and condition."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, condition: str, predicted: Tensor, labels: Tensor) -> None:
        """Count the pixels of one scene."""
        pairs = (labels * len(CLASSES) + predicted).flatten()
        counts = torch.bincount(pairs, minlength=len(CLASSES) ** 2).view(len(CLASSES), -1).double()
        self.tables[name, condition] = self.tables.get((name, condition), 0) + counts

    def mious(self) -> Scores:
        """Return the mIoU of each prediction in percent, averaged over the conditions."""
        found: dict[str, list[float]] = {}
        for (name, _), table in self.tables.items():
            hit = table.diagonal()
            union = table.sum(0) + table.sum(1) - hit
            found.setdefault(name, []).append(float(100 * (hit / union)[union > 0].mean()))
        return {name: sum(values) / len(values) for name, values in found.items()}


def compare_fractions(network: str, seed: int, scenes: int) -> Scores:
    """Return the mIoU of a network by the fraction of each scene in its statistics."""
    net, found = NETWORKS[network](), {}
    for fraction in FRACTIONS:
        model = ctta.BNStats(net, batch_stats=fraction)
        result = ctta.evaluate(model, streets(split="choose", num_scenes=scenes, batch_size=1, seed=seed))
        found[f"batch_stats {fraction:g}"] = 100 * result.miou
    return found


@torch.no_grad()
def compare_views(network: str, seed: int, scenes: int, fraction: float) -> Scores:
    """Return the mIoU of a network without learning, by what it averages over; every view is computed once."""
    model = ctta.BNStats(NETWORKS[network](), batch_stats=fraction)
    confusions = Confusions()
    views = multiscale_flip(SCALES)
    for batch in streets(split="choose", num_scenes=scenes, batch_size=1, seed=seed):
        assert batch.y is not None, "drawn scenes have labels"
        logits = [view(model.predict, batch.x) for view in views]
        probabilities = torch.stack([each.softmax(1) for each in logits])
        direct = model.predict(batch.x).softmax(1)
        confidence = direct.amax(1, keepdim=True)
        for scale in SCALES:
            alone = probabilities[[view.scale == scale for view in views]].sum(0)
            confusions.add(f"scale {scale:g} alone", batch.domain, alone.argmax(1), batch.y)
        for power in POWERS:
            weights = torch.stack([weigh_by_confidence(each, power) for each in logits])
            for name, scales in SCALE_SETS.items():
                chosen = torch.tensor([view.scale in scales for view in views])
                mean = (weights[chosen] * probabilities[chosen]).sum(0) / weights[chosen].sum(0)
                for threshold in THRESHOLDS:
                    refined = torch.where(confidence < threshold, mean, direct).argmax(1)
                    confusions.add(describe_views(name, power, threshold), batch.domain, refined, batch.y)
    return confusions.mious()


def describe_views(scales: str, power: float, threshold: float) -> str:
    """Return the name of a way to average."""
    return f"scales {scales}, power {power:g}, threshold {threshold:g}"


def compare_learning(network: str, seed: int, scenes: int, num_rounds: int, settings: dict[str, Any]) -> Scores:
    """Return the mIoU of each way to learn, and how much it loses from the first round to the last."""
    net, found = NETWORKS[network](), {}
    once = streets(split="choose", num_scenes=scenes, batch_size=1, seed=seed)
    num_conditions = len(once.segments)
    for loss, lr in product((*LOSSES, "tent"), RATES):
        optimizer = partial(torch.optim.Adam, lr=lr)
        if loss == "tent":
            model: ctta.AdaptiveModel = ctta.Tent(net, optimizer=optimizer, batch_stats=settings["batch_stats"])
        else:
            model = ctta.CoTTA.official_segmentation(net, optimizer=optimizer, loss=loss, **settings)
        mious = [100 * miou for miou in ctta.evaluate(model, rounds(once, num_rounds)).mious]
        name = describe_learning(loss, lr)
        found[name] = sum(mious) / len(mious)
        found[f"{name}: decay"] = (sum(mious[:num_conditions]) - sum(mious[-num_conditions:])) / num_conditions
    return found


def describe_learning(loss: str, lr: float) -> str:
    """Return the name of a way to learn."""
    return f"{loss}, lr {lr:g}"


def measure(
    title: str, compare: Callable[[str, int], Scores], networks: Sequence[str], workers: int, out: Path
) -> dict[str, Scores]:
    """Return the scores of each network, averaged over the seeds, from the file or anew; and add them to the file."""
    known: dict[str, dict[str, Scores]] = json.loads(out.read_text()) if out.exists() else {}
    found = known.setdefault(title, {})
    for network in networks:
        if network in found:
            continue
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            found[network] = average(list(pool.map(partial(compare, network), SEEDS)))
        with atomic_write(out) as temporary:
            temporary.write_text(json.dumps(known, indent=1) + "\n")
    return found


def average(scores: list[Scores]) -> Scores:
    """Return the mean of each score."""
    return {name: sum(each[name] for each in scores) / len(scores) for name in scores[0]}


def print_scores(title: str, by_network: dict[str, Scores], chosen: str) -> None:
    """Print the scores of each network, and what was chosen."""
    print(f"\n{title}: {', '.join(by_network)}", flush=True)
    for name in next(iter(by_network.values())):
        values = "".join(f"{scores[name]:8.2f}" for scores in by_network.values())
        print(f"  {name:50}{values}{'   chosen' if name == chosen else ''}", flush=True)


def main() -> None:
    """Print every score and the chosen settings."""
    parser = argparse.ArgumentParser(description="Choose the settings of CoTTA.segmentation.")
    parser.add_argument("--out", type=Path, required=True, help="file for all scores, .json")
    parser.add_argument("--scenes", type=int, default=5, help="scenes per condition without learning")
    parser.add_argument("--learning-scenes", type=int, default=3, help="scenes per condition with learning")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with learning")
    parser.add_argument("--workers", type=int, default=2, help="number of trials at a time")
    arguments = parser.parse_args()
    run = partial(measure, workers=arguments.workers, out=arguments.out)

    statistics = run("statistics", partial(compare_fractions, scenes=arguments.scenes), ("streets-bn",))
    best = max(statistics["streets-bn"], key=lambda name: statistics["streets-bn"][name])
    print_scores("Statistics", statistics, best)
    fraction = float(best.split()[-1])

    views = run("views", partial(compare_views, scenes=arguments.scenes, fraction=fraction), tuple(NETWORKS))
    ways = list(product(SCALE_SETS, POWERS, THRESHOLDS))
    way = max(ways, key=lambda way: sum(views[network][describe_views(*way)] for network in NETWORKS))
    print_scores("Views", views, describe_views(*way))
    scales, power, threshold = way
    if power not in (0, ENTROPY_POWER):
        raise SystemExit(f"weigh views by the power {power:g} in ctta.views.average, and run this again")

    settings: dict[str, Any] = {
        "views": multiscale_flip(SCALE_SETS[scales]),
        "view_weights": "confidence" if power else "equal",
        "threshold": threshold,
        "batch_stats": fraction,
    }
    compare = partial(
        compare_learning, scenes=arguments.learning_scenes, num_rounds=arguments.rounds, settings=settings
    )
    learning = run("learning", compare, tuple(NETWORKS))
    steady = [
        name
        for name in (describe_learning(*each) for each in product(LOSSES, RATES))
        if all(learning[network][f"{name}: decay"] <= MAX_DECAY for network in NETWORKS)
    ]
    best = max(steady, key=lambda name: sum(learning[network][name] for network in NETWORKS), default="none")
    print_scores("Learning", learning, best)
    print(f"\nChosen: {settings}, {best}")


if __name__ == "__main__":
    main()
