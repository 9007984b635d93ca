"""Exceptions that say whose fault a failure is.

Everything a caller can mend has a class here. Whatever else fails inside a network (a ``RuntimeError``, running out of
memory) keeps its own type and only gets a note, see :func:`annotate_network_errors`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class InputError(ValueError):
    """Raised for an input that a caller sent: a batch, an image or a value that the library cannot take."""


class ConfigError(ValueError):
    """Raised for settings that contradict each other, the network or an earlier run."""


class CheckpointError(ValueError):
    """Raised for a saved file that is damaged, of another network or not a checkpoint of this library."""


class DataError(ValueError):
    """Raised for data on disk that is missing, truncated or in an unexpected format."""


class DownloadError(OSError):
    """Raised for a file that cannot be downloaded, verified or unpacked."""


@contextmanager
def annotate_network_errors(x: Tensor) -> Iterator[None]:
    """Add a note with the shape of the batch and what to try to a ``RuntimeError`` of a network."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"The network failed on a batch of shape {tuple(x.shape)}: resize the images to what the network expects, "
            "or use smaller batches if memory ran out."
        )
        raise
