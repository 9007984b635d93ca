"""What the ways to be faster bring on this machine: time of a CoTTA step with each, over that without.

python benchmarks/options_speed.py
"""

from collections.abc import Callable
from functools import partial

import torch
from measuring import peak_bytes, time_ratio
from resnet50 import resnet50
from step_speed import cifar_batch
from torch import Tensor, nn

import ctta
from ctta.views import image_views

Layout = torch.memory_format


def embedded(layout: Layout = torch.channels_last) -> nn.Module:
    net: nn.Module = ctta.models.embedded().to(memory_format=layout)  # type: ignore[call-overload]
    return net


def compiled(net: nn.Module) -> ctta.CoTTA:
    model = ctta.CoTTA(net, threshold=1.0)
    model.teacher.compile()
    return model


def against(plain: ctta.AdaptiveModel, faster: ctta.AdaptiveModel, x: Tensor, pairs: int) -> float:
    return time_ratio(partial(faster, x), partial(plain, x), pairs)


def ways() -> dict[str, Callable[[], float]]:
    usual, always = partial(embedded, torch.contiguous_format), {"threshold": 1.0}
    x, single = cifar_batch(), cifar_batch(1)
    blended = {**always, "batch_stats": 0.1}  # a single image has hardly any statistics
    return {
        "CoTTA.fast / CoTTA": lambda: against(
            ctta.CoTTA(embedded(), **always), ctta.CoTTA.fast(embedded(), **always), x, 3
        ),
        "channels-last / contiguous": lambda: against(
            ctta.CoTTA(usual(), **always), ctta.CoTTA(embedded(), **always), x, 3
        ),
        "compiled / plain, channels-last": lambda: against(
            ctta.CoTTA(embedded(), **always), compiled(embedded()), x, 3
        ),
        "compiled / plain, contiguous": lambda: against(ctta.CoTTA(usual(), **always), compiled(usual()), x, 3),
        "views_at_once=8 / 1, single images": lambda: against(
            ctta.CoTTA(embedded(), **blended), ctta.CoTTA(embedded(), views_at_once=8, **blended), single, 15
        ),
        "views_at_once=8 / 1, batch 200": lambda: against(
            ctta.CoTTA(embedded(), **always), ctta.CoTTA(embedded(), views_at_once=8, **always), x, 3
        ),
        "views_at_once=8 / 1, batch 200, peak memory": lambda: peak_ratio(x),
        "Adam fused / as torch has it, ResNet-50": fused_ratio,
        "bfloat16 autocast / float32, batch 20": lambda: autocast_ratio(x[:20]),
    }


def autocast_ratio(x: Tensor) -> float:
    plain, half = (ctta.CoTTA(embedded(), threshold=1.0, views=image_views(2)) for _ in range(2))

    def under_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half(x)

    return time_ratio(under_autocast, partial(plain, x), 3)


def peak_ratio(x: Tensor) -> float:
    plain, stacked = (ctta.TestAug(embedded(), views=image_views(8), views_at_once=count) for count in (1, 8))
    return peak_bytes(partial(stacked.predict, x)) / peak_bytes(partial(plain.predict, x))


def fused_ratio() -> float:
    plain, fused = (torch.optim.Adam(resnet50().parameters(), lr=1e-3, fused=fused) for fused in (None, True))
    for optimizer in (plain, fused):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    return time_ratio(fused.step, plain.step, 9)


def main() -> None:
    for name, ratio in ways().items():
        print(f"{name:44}{ratio():7.2f}", flush=True)


if __name__ == "__main__":
    main()
