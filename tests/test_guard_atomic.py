"""A guarded step is atomic: if any forward pass of it fails, nothing has changed."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from guarded_streams import make_batches, trained_network
from torch import Tensor, nn

import ctta
from ctta.core.transaction import restore_on_error
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


@pytest.mark.parametrize("method", METHODS)
def test_an_event_that_cannot_be_written_leaves_the_model_unchanged(method: str) -> None:
    """The disk of the audit log is full when the third batch resets the method, after it has learned."""
    batches = make_batches(3)
    expected = Guarded(METHODS[method](), reset_every=3)
    outputs = [expected(x) for x in batches]
    model = Guarded(METHODS[method](), reset_every=3)
    for x in batches[:2]:
        model(x)
    before, events = collect_state(model), model.events
    model.audit = "/dev/full"
    with pytest.raises(OSError, match="No space left"):
        model(batches[2])
    assert is_equal(collect_state(model), before) and model.events == events
    model.audit = None
    assert torch.equal(model(batches[2]), outputs[2])
    assert [event.kind for event in model.events] == ["periodic_reset"]


def test_blocks_of_a_wrapper_and_of_what_it_wraps_restore_once() -> None:
    """The outer block restores what was assigned as well as what was written, and later blocks start anew."""
    model, batches = Guarded(METHODS["tent"](), inspect_every=1), make_batches(4)
    model(batches[0])
    before, wrapped = collect_state(model), model.wrapped
    with pytest.raises(KeyError), restore_on_error(model):
        model(batches[1])
        with restore_on_error(model.wrapped):
            model.wrapped(batches[2])
        model.rollback()
        model.freeze()
        raise KeyError
    assert is_equal(collect_state(model), before) and model.wrapped is wrapped
    assert not model.frozen and model.num_steps == 1 and model.events == []
    with pytest.raises(KeyError), restore_on_error(model.wrapped):
        model.wrapped(batches[3])
        raise KeyError
    assert is_equal(collect_state(model), before)


def test_a_step_is_undone_and_made_again() -> None:
    """As often as one likes, also within the block of a service; an error afterwards restores what there was before."""
    model, batches = METHODS["tent"](), make_batches(4)
    for x in batches[:2]:
        model(x)
    before = collect_state(model)
    with pytest.raises(KeyError), restore_on_error(model), restore_on_error(model) as undo:
        first = model(batches[2])
        undo()
        assert is_equal(collect_state(model), before) and model.num_steps == 2
        assert torch.equal(model(batches[2]), first)
        after = collect_state(model)
        with restore_on_error(model) as undo_second:
            model(batches[3])
            undo_second()
        assert is_equal(collect_state(model), after)
        raise KeyError
    assert is_equal(collect_state(model), before)
