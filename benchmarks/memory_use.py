"""What a stream keeps in memory, and what the views take while they are computed."""

from collections.abc import Iterator
from functools import partial

from measuring import Measurement, live_bytes, peak_bytes
from step_speed import cifar_batch

import ctta
from ctta.views import image_views


def measure() -> Iterator[Measurement]:
    yield Measurement("memory that lasts / student, teacher, source, Adam's state, ResNet-20", lasting_ratio(), 1.01)
    yield Measurement("peak memory of 32 views / of one", peak_ratio(), 1.01)


def lasting_ratio() -> float:
    x, net = cifar_batch(), ctta.models.embedded()
    before = live_bytes()
    model = ctta.CoTTA(net, threshold=1.0, views=image_views(2))
    for _ in range(3):
        model(x)
    lasting = live_bytes() - before
    assert model.optimizer is not None
    state = model.optimizer.state.values()
    tensors = [*model.state_dict().values(), *(value for values in state for value in values.values())]
    expected = sum(int(tensor.nbytes) for tensor in tensors)
    return lasting / expected


def peak_ratio() -> float:
    x, net = cifar_batch(), ctta.models.embedded()
    peaks = []
    for views in (image_views(32), image_views(1)):
        model = ctta.TestAug(net, views=views)
        model.predict(x)
        peaks.append(peak_bytes(partial(model.predict, x)))
    return peaks[0] / peaks[1]
