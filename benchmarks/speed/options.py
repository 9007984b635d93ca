"""The effect of each speed option on this machine: time of a CoTTA step with the option divided by time without.

python -m benchmarks.speed.options
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.measurements import peak_bytes, time_ratio
from benchmarks.speed.resnet50 import resnet50
from benchmarks.speed.steps import cifar_batch
from ctta.data.corruptions import CORRUPTIONS
from ctta.views import fast_image_views, image_views

Layout = torch.memory_format


def embedded(layout: Layout = torch.channels_last) -> nn.Module:
    """Return the embedded network in a memory layout."""
    net: nn.Module = ctta.models.embedded().to(memory_format=layout)  # type: ignore[call-overload]
    return net


def cotta(net: nn.Module, **settings: Any) -> ctta.CoTTA:
    """Return a model that uses its views in every step."""
    return ctta.CoTTA(net, threshold=1.0, **settings)


def faster_ratio() -> float:
    """Return the time of CoTTA.faster relative to CoTTA.fast over all corruptions, one batch of each.

    How many images have views depends on what the network knows, so the images are real, and none of the corruptions
    stands for all. Both models take turns by the batch; time is that of one core, which other programs hardly change.
    """
    models = ctta.CoTTA.fast(embedded(), threshold=1.0), ctta.CoTTA.faster(embedded())
    spent = [0.0, 0.0]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for corruption in CORRUPTIONS:
            x, _ = ctta.data.datasets.sample().domain(corruption, 5).read(np.arange(200))
            for place, model in enumerate(models):
                started = time.process_time()
                model(x)
                spent[place] += time.process_time() - started
    finally:
        torch.set_num_threads(num_threads)
    return spent[1] / spent[0]


def compiled(net: nn.Module) -> ctta.CoTTA:
    """Return a model whose networks are compiled."""
    return cotta(net).compile()


def compare(plain: ctta.CoTTA, faster: ctta.CoTTA, x: Tensor, pairs: int = 3) -> float:
    """Return the time of a step of the second model relative to the first."""
    return time_ratio(partial(faster, x), partial(plain, x), pairs).median


def options() -> dict[str, Callable[[], float]]:
    """Return the measurement of every option by name."""
    contiguous = partial(embedded, torch.contiguous_format)
    x, single = cifar_batch(), cifar_batch(1)
    blended = partial(cotta, batch_stats=0.1)  # the statistics of a single image say little
    return {
        "CoTTA.fast / CoTTA": lambda: compare(cotta(embedded()), cotta(embedded(), views=fast_image_views()), x),
        "CoTTA.faster / CoTTA.fast, all corruptions": faster_ratio,
        "channels-last / contiguous": lambda: compare(cotta(contiguous()), cotta(embedded()), x),
        "compiled / plain, channels-last": lambda: compare(cotta(embedded()), compiled(embedded()), x),
        "compiled / plain, contiguous": lambda: compare(cotta(contiguous()), compiled(contiguous()), x),
        "views_at_once=8 / 1, single images": lambda: compare(
            blended(embedded()), blended(embedded(), views_at_once=8), single, pairs=15
        ),
        "views_at_once=8 / 1, batch 200": lambda: compare(cotta(embedded()), cotta(embedded(), views_at_once=8), x),
        "views_at_once=8 / 1, batch 200, peak memory": lambda: peak_ratio(x),
        "Adam fused / default, ResNet-50": fused_ratio,
        "bfloat16 autocast / float32, batch 20": lambda: autocast_ratio(x[:20]),
    }


def autocast_ratio(x: Tensor) -> float:
    """Return the time of a step under autocast relative to float32."""
    plain, half = (cotta(embedded(), views=image_views(2)) for _ in range(2))

    def under_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half(x)

    return time_ratio(under_autocast, partial(plain, x), 3).median


def peak_ratio(x: Tensor) -> float:
    """Return the peak memory of eight views at once relative to one after the other."""
    plain, stacked = (ctta.TestAug(embedded(), views=image_views(8), views_at_once=count) for count in (1, 8))
    return peak_bytes(partial(stacked.predict, x)) / peak_bytes(partial(plain.predict, x))


def fused_ratio() -> float:
    """Return the time of a fused Adam step relative to the default one."""
    plain, fused = (torch.optim.Adam(resnet50().parameters(), lr=1e-3, fused=fused) for fused in (None, True))
    for optimizer in (plain, fused):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    return time_ratio(fused.step, plain.step, 9).median


def main() -> None:
    """Print the ratio of every option."""
    for name, ratio in options().items():
        print(f"{name:44}{ratio():7.2f}", flush=True)


if __name__ == "__main__":
    main()
