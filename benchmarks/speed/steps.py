"""The time of a step relative to the forward and backward passes of the network that it needs."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.baseline import faster_layout, forward, forward_backward
from benchmarks.speed.measurements import Measurement, Ratio, seconds, time_ratio
from benchmarks.speed.resnet50 import resnet50
from ctta.functional import ema_update_, entropy, stochastic_restore_
from ctta.nn import find_norm_parameters
from ctta.nn.surgery import train_only_
from ctta.optim import step_if_finite_
from ctta.views import image_views

NUM_VIEWS = 32
#: On ResNet-50, whose passes take long.
FEW_VIEWS = 4


def cifar_batch(size: int = 200) -> Tensor:
    return torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def imagenet_batch() -> Tensor:
    return torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def measure() -> Iterator[Measurement]:
    """Yield the ratios of BN Stats, TENT and CoTTA."""
    x = cifar_batch()
    yield bn_stats_ratio(x).as_measurement("BN Stats / forward, ResNet-20, batch 200", 1.02)
    yield tent_ratio(x).as_measurement("TENT step / forward-backward + Adam, ResNet-20, batch 200", 1.05)
    yield view_ratio(x).as_measurement("one view / forward, ResNet-20, batch 200, mean of 64 draws", 0.25)
    name = "views / the same bare passes"
    small = cotta_ratio(ctta.models.embedded, x, NUM_VIEWS, pairs=3)
    yield small.as_measurement(f"CoTTA step, {NUM_VIEWS} {name}, ResNet-20, batch 200", 1.25)
    yield update_ratio().as_measurement("EMA + restore + Adam / forward, ResNet-50, batch 16", 0.10)
    large = cotta_ratio(resnet50, imagenet_batch(), FEW_VIEWS, pairs=3)
    yield large.as_measurement(f"CoTTA step, {FEW_VIEWS} {name}, ResNet-50, 224, batch 16", 1.05)


def bn_stats_ratio(x: Tensor) -> Ratio:
    net = faster_layout(ctta.models.embedded, x, forward)
    model = ctta.BNStats(net)
    return time_ratio(partial(model, x), partial(forward, net, x), pairs=60, warm_up=5)


def tent_ratio(x: Tensor) -> Ratio:
    net = faster_layout(ctta.models.embedded, x, forward_backward)
    model = ctta.Tent(net)
    train_only_(net, find_norm_parameters(net))
    optimizer = torch.optim.Adam([parameter for parameter in net.parameters() if parameter.requires_grad], lr=1e-3)

    def baseline_step() -> None:
        entropy(net(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return time_ratio(partial(model, x), baseline_step, pairs=20, warm_up=3)


def view_ratio(x: Tensor) -> Ratio:
    net = faster_layout(ctta.models.embedded, x, forward)
    views = ctta.views.image_views(64).draw(torch.Generator().manual_seed(0))

    def all_views() -> None:
        for view in views:
            view.augment(x)

    def forwards() -> None:
        for _ in views[::4]:  # a quarter, which is enough to compare with
            forward(net, x)

    found = time_ratio(all_views, forwards, pairs=5)
    return Ratio(found.median / 4, found.low / 4, found.high / 4)


def cotta_ratio(build: Callable[[], nn.Module], x: Tensor, num_views: int, pairs: int) -> Ratio:
    net = faster_layout(build, x, forward)  # all passes but one are forward only
    model = ctta.CoTTA(net, threshold=0.0, views=image_views(num_views))
    model(x)  # a first step, without views, creates the optimizer state
    model.threshold = 1.0  # no network is that confident on random images: every step uses the views

    def baseline_passes() -> None:
        for _ in range(num_views + 1):  # the views and the source network
            forward(net, x)
        forward_backward(net, x)

    ratio = time_ratio(partial(model, x), baseline_passes, pairs, warm_up=0)
    assert model.last_step is not None and model.last_step.augmented == 1, (
        "expected every step to average over the views"
    )
    return ratio


def update_ratio() -> Ratio:
    """Measure what a step does besides passes through the network, given the gradients."""
    x = imagenet_batch()
    net = faster_layout(resnet50, x, forward)
    student, teacher, source = (copy.deepcopy(net) for _ in range(3))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    parameters = list(student.parameters())

    def cheap_loss() -> Tensor:
        """Return a loss whose backward pass does little more than write the gradients."""
        return sum((parameter.sum() for parameter in parameters), torch.zeros(()))

    def update() -> None:
        step_if_finite_(optimizer, cheap_loss())
        ema_update_(teacher, student, 0.999)
        stochastic_restore_(student, source, 0.01, torch.Generator().manual_seed(0))

    def gradients_only() -> None:
        cheap_loss().backward()
        optimizer.zero_grad()

    update()
    times = [(seconds(update) - seconds(gradients_only), seconds(partial(forward, net, x))) for _ in range(9)]
    return Ratio.of_pairs([update_time / forward_time for update_time, forward_time in times])
