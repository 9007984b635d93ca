"""The memory that a model keeps, the peak memory of its views, and what reducing that of a step saves.

    python -m benchmarks.speed.memory [BATCH]

prints the peak of a TENT step on a ViT-B/16 at 224 pixels with batches of 64, or of BATCH images; it takes minutes.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.measurements import Measurement, live_bytes, peak_bytes, seconds
from benchmarks.speed.resnet50 import resnet50
from benchmarks.speed.steps import cifar_batch
from ctta.nn.activations import MemoryReduction
from ctta.views import image_views


def measure() -> Iterator[Measurement]:
    """Yield the ratios of persistent and peak memory."""
    yield Measurement("persistent memory / student, teacher, source, Adam's state, ResNet-20", persistent_ratio(), 1.01)
    yield Measurement("peak memory of 32 views / of one", peak_ratio(), 1.01)
    name = "TENT's peak activations"
    yield Measurement(f"{name}, checkpoint / plain, ViT-B/16, batch 4", reduced_ratio(vit_b16, "checkpoint", 4), 0.6)
    yield Measurement(f"{name}, checkpoint / plain, ResNet-50, batch 4", reduced_ratio(resnet50, "checkpoint", 4), 0.6)
    yield Measurement(f"{name}, frozen / plain, ResNet-50, batch 4", reduced_ratio(resnet50, "frozen", 4), 0.75)


def persistent_ratio() -> float:
    """Return the memory of all tensors of a model relative to those that it needs."""
    x, net = cifar_batch(), ctta.models.embedded()
    before = live_bytes()
    model = ctta.CoTTA(net, threshold=1.0, views=image_views(2))
    for _ in range(3):
        model(x)
    persistent = live_bytes() - before
    assert model.optimizer is not None
    state = model.optimizer.state.values()
    tensors = [*model.state_dict().values(), *(value for values in state for value in values.values())]
    expected = sum(int(tensor.nbytes) for tensor in tensors)
    return persistent / expected


def peak_ratio() -> float:
    """Return the peak memory of 32 views relative to one view."""
    x, net = cifar_batch(), ctta.models.embedded()
    peaks = []
    for views in (image_views(32), image_views(1)):
        model = ctta.TestAug(net, views=views)
        model.predict(x)
        peaks.append(peak_bytes(partial(model.predict, x)))
    return peaks[0] / peaks[1]


def vit_b16() -> nn.Module:
    """Return a ViT-B/16 (86 million parameters) of transformers, initialized randomly."""
    from transformers import ViTConfig, ViTForImageClassification

    net: nn.Module = ViTForImageClassification(ViTConfig())
    return net.eval()


def draw_images(number: int) -> Tensor:
    return torch.rand(number, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def tent_peak(net: nn.Module, kind: MemoryReduction | None, x: Tensor) -> tuple[int, float]:
    """Return the peak memory of a step beyond the model itself, and its seconds; the first step comes before."""
    model = ctta.adapt(net, "tent", reduce_memory=kind)
    model(x[:2])  # creates the state of the optimizer
    spent = 0.0

    def step() -> None:
        nonlocal spent
        spent = seconds(partial(model, x))

    return peak_bytes(step), spent


def reduced_ratio(build: Callable[[], nn.Module], kind: MemoryReduction, batch_size: int) -> float:
    """Return the peak memory of a step relative to the same without reduction."""
    net, x = build(), draw_images(batch_size)
    return tent_peak(net, kind, x)[0] / tent_peak(net, None, x)[0]


def main() -> None:
    """Print the peak of a step on a large network, with and without reduction."""
    x, net = draw_images(int(sys.argv[1]) if sys.argv[1:] else 64), vit_b16()
    weights = 2 * sum(parameter.nbytes for parameter in net.parameters())  # source and student
    kinds: tuple[MemoryReduction | None, ...] = (None, "checkpoint")
    for kind in kinds:
        peak, spent = tent_peak(net, kind, x)
        print(
            f"{kind!s:12}activations {peak >> 20} MiB, with weights {(peak + weights) >> 20} MiB, {spent:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
