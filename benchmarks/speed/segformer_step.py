"""Cost of a CoTTA step with 14 views on a SegFormer, with the settings of the reference implementation.

    python -m benchmarks.speed.segformer_step          B0 at 128x256: time of the step relative to the bare passes
    python -m benchmarks.speed.segformer_step b5       B5 at 540x960, as in the paper: time and memory of one step

The first exits with an error if its target is missed. The second uses the sliding window of the reference
implementation, as the recipe acdc does, and takes minutes on a CPU.
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from benchmarks.speed import baseline
from benchmarks.speed.measurements import Measurement, Ratio, seconds, time_ratio
from ctta.evaluation.steps import PeakMemory
from ctta.models import SlidingWindow, segformer
from ctta.views import multiscale_flip


def scene(height: int, width: int) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


def random_network(size: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return segformer(size)


def measure() -> Iterator[Measurement]:
    name = "CoTTA step, 14 views / the same bare passes, SegFormer-B0, 128x256"
    yield cotta_ratio(random_network("b0"), scene(128, 256), pairs=7).as_measurement(name, 1.08)


def cotta_ratio(net: nn.Module, x: Tensor, pairs: int) -> Ratio:
    """Return the time of a step relative to its bare passes on precomputed views, each resized to its image."""
    model = ctta.CoTTA.official_segmentation(net)  # a random network is never confident: the gate always opens
    images = [view.augment(x) for view in multiscale_flip()]

    def bare_passes() -> None:
        for image in (*images, x):  # the views, and the source network
            forward(net, image)
        forward_backward(net, x)

    ratio = time_ratio(partial(model, x), bare_passes, pairs)
    assert model.last_step is not None and model.last_step.augmented == 1, "a step did not average over the views"
    return ratio


def predict(net: nn.Module, x: Tensor) -> Tensor:
    """Return the logits at the size of the image."""
    return F.interpolate(net(x).logits, size=x.shape[2:], mode="bilinear", align_corners=False)


@torch.no_grad()
def forward(net: nn.Module, x: Tensor) -> Tensor:
    return predict(net, x)


def forward_backward(net: nn.Module, x: Tensor) -> None:
    logits = predict(net, x)
    F.cross_entropy(logits, logits.detach().argmax(1)).backward()
    net.zero_grad()


def measure_b5() -> None:
    net, x = SlidingWindow(random_network("b5")), scene(540, 960)
    model = ctta.CoTTA.official_segmentation(net)
    weights = sum(parameter.nbytes for parameter in model.parameters()) >> 20
    memory = PeakMemory(x.device)
    print(f"SegFormer-B5, 540x960, {torch.get_num_threads()} threads; three networks hold {weights} MiB", flush=True)
    print(f"one pass of the network: {seconds(partial(baseline.forward, net, x)):.1f} s", flush=True)
    print(f"one CoTTA step, 14 views: {seconds(partial(model, x)):.1f} s, peak memory {memory.read_mib()} MiB")


def main() -> None:
    if sys.argv[1:] == ["b5"]:
        measure_b5()
        return
    print(f"{'':74}{'ratio':>7}{'target':>8}")
    measurements = list(measure())
    for measurement in measurements:
        print(measurement)
    if missed := [measurement.name for measurement in measurements if not measurement.is_met]:
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
