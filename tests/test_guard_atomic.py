"""A guarded step is atomic: if any forward pass of it fails, nothing has changed."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from guarded_streams import make_batches, trained_network
from torch import Tensor, nn

import ctta
from ctta.guard import Guarded
from ctta.testing.case import collect_state


class FailingNetwork(nn.Module):
    """A network whose n-th forward pass from now on raises; all copies count together."""

    passes_left: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.net = trained_network()

    def forward(self, x: Tensor) -> Tensor:
        if FailingNetwork.passes_left is not None:
            FailingNetwork.passes_left -= 1
            if FailingNetwork.passes_left < 0:
                raise RuntimeError("the device is lost")
        logits: Tensor = self.net(x)
        return logits


METHODS: dict[str, Callable[[], ctta.AdaptiveModel]] = {
    "tent": lambda: ctta.Tent(FailingNetwork()),
    "cotta": lambda: ctta.CoTTA(FailingNetwork(), views=ctta.views.image_views(2), threshold=2.0),
}


def is_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("num_batches_before", [0, 2])  # the optimizer has no state at first
@pytest.mark.parametrize("method", METHODS)
def test_a_failure_in_any_forward_pass_leaves_the_model_unchanged(method: str, num_batches_before: int) -> None:
    batches = make_batches(num_batches_before + 2)
    expected = Guarded(METHODS[method](), inspect_every=1)
    outputs = [expected(x) for x in batches]

    num_failures = 0
    while True:
        model = Guarded(METHODS[method](), inspect_every=1)
        for x in batches[:num_batches_before]:
            model(x)
        before, counters = collect_state(model), {**model.counters, **model.wrapped.counters}
        FailingNetwork.passes_left = num_failures
        try:
            model(batches[num_batches_before])
            break  # every pass of the step has failed once
        except RuntimeError:
            num_failures += 1
        finally:
            FailingNetwork.passes_left = None
        assert is_equal(collect_state(model), before)
        assert {**model.counters, **model.wrapped.counters} == counters
        retried = [model(x) for x in batches[num_batches_before:]]
        assert is_equal(retried, outputs[num_batches_before:]), f"pass {num_failures} failed"
    # The method's own passes, and after them the guard's: the source and the anchor.
    assert num_failures == {"tent": 3, "cotta": 5}[method]
