"""What to do where a network fails on one's own images."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


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
