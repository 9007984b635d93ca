"""Streams that do not wait: how many batches arrive during one step of a method, counted in passes of the network."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ctta.core.model import AdaptiveModel
from ctta.data.streams import Stream

#: A backward pass costs as much as this many forward passes.
BACKWARD_COST = 2
#: Passes are counted over at least this many batches and images, as some methods do not update at every batch.
MIN_BATCHES, MIN_IMAGES = 4, 256


@dataclass
class PassCount:
    """Images that went through networks of one class.

    Attributes:
        forward: Number of images that went forward.
        backward: Number of images whose gradient went back.
    """

    forward: int = 0
    backward: int = 0


@contextmanager
def count_passes(kind: type[nn.Module]) -> Iterator[PassCount]:
    """Count the images that go forward and back through all networks of a class within the context.

    Args:
        kind: The class of the networks; one that is a part of another one does not count.

    Yields:
        The numbers so far.
    """
    count, depth = PassCount(), 0

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal depth
        depth += type(module) is kind

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        nonlocal depth
        if type(module) is not kind:
            return
        depth -= 1
        if depth > 0:
            return
        num_images, is_counted = len(inputs[0]), False
        count.forward += num_images

        def count_backward(gradient: Tensor) -> None:
            nonlocal is_counted
            count.backward += 0 if is_counted else num_images  # once, however many outputs the loss uses
            is_counted = True

        # The logits are extracted after this hook: here the output may still be a dict or an object with several.
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(count_backward)

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def count_step_ratio(model: AdaptiveModel, stream: Stream) -> float:
    """Return how many plain forward passes a step of a method costs on the first batches of a stream.

    Counted in passes of the network, not measured in seconds, so that it is the same on every machine: a forward pass
    of an image counts 1, a backward pass 2.

    Args:
        model: A new model; a fork of it adapts, and the model itself does not.
        stream: The stream; its position does not change.

    Returns:
        The ratio, which is seldom a whole number for a method that learns from some of the images.
    """
    fork = model.fork()
    num_batches = min(len(stream), max(MIN_BATCHES, ceil(MIN_IMAGES / stream.batch_size)))
    reference = next((each for each in model.source.parameters() if each.is_floating_point()), None)
    num_images = 0
    with count_passes(type(model.source)) as count:
        for number in range(num_batches):
            x = stream.read_batch(number).x
            num_images += len(x)
            rows = x[model.coordinator.local_rows(len(x))]
            fork(rows if reference is None else rows.to(reference))
    costs = model.coordinator.all_gather_object(lambda: count.forward + BACKWARD_COST * count.backward)
    return sum(costs) / num_images


def whole_ratio(ratio: float) -> int:
    """Return how many batches arrive during a step that takes this many times as long as a batch to arrive."""
    return max(1, ceil(ratio))
