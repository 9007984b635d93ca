"""What to do where a network fails: on one's own images, or to reach its device."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def explaining_failure(x: Tensor) -> Iterator[None]:
    """Torch's errors about shapes and memory, as one sentence on what can be done about them."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the network failed on {len(x)} images of {x.shape[2]}x{x.shape[3]} ({reason}): "
            "resize them to what it takes, or give smaller batches if memory ran out"
        ) from error


def on_device(net: nn.Module, device: str) -> nn.Module:
    """The network there, or one sentence on what is wrong with the device."""
    try:
        return net.to(device)
    except (RuntimeError, AssertionError) as error:  # torch has both for a device that is not there
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"the device {device!r} cannot be used: {reason}; expected one such as cpu or cuda:0"
        ) from error
