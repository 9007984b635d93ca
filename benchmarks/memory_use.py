"""The memory that a model keeps, and the peak memory of its views."""

from collections.abc import Iterator
from functools import partial

from measurements import Measurement, live_bytes, peak_bytes
from step_speed import cifar_batch

import ctta
from ctta.views import image_views


def measure() -> Iterator[Measurement]:
    """Yield the ratios of persistent and peak memory."""
    yield Measurement("persistent memory / student, teacher, source, Adam's state, ResNet-20", persistent_ratio(), 1.01)
    yield Measurement("peak memory of 32 views / of one", peak_ratio(), 1.01)


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
