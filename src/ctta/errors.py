"""Exceptions that tell a caller's mistakes apart from failures of the library or of a network.

Whatever else fails inside a network (a ``RuntimeError``, running out of memory) keeps its own type and only gets a
note: a model annotates its steps with :func:`annotate_network_errors`.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds to import, and the command line reports errors without it
    from torch import Tensor

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpointError",
    "DataError",
    "DownloadError",
    "InputError",
    "annotate_network_error",
    "annotate_network_errors",
    "did_you_mean",
    "first_line",
    "is_user_error",
]

_NOTE = "The network failed on a batch of shape"


class InputError(ValueError):
    """Raised for an input that the library cannot process: a batch, an image or a value of a request."""


class ConfigError(ValueError):
    """Raised for settings that are out of range, or contradict each other, the network or an earlier run."""


class CheckpointError(ValueError):
    """Raised for a file that is damaged, not a checkpoint, or the checkpoint of another network."""


class DamagedCheckpointError(CheckpointError):
    """Raised for a file that is truncated, damaged or not a checkpoint, whatever network and settings it is for."""


class DataError(ValueError):
    """Raised for data on disk that is missing, truncated or in an unexpected format."""


class DownloadError(OSError):
    """Raised for a file that cannot be downloaded, verified or unpacked."""


@contextmanager
def annotate_network_errors(x: "Tensor") -> Iterator[None]:
    """Add a note with the shape of the batch and a hint to any ``RuntimeError`` of a network.

    Of nested contexts the innermost one adds its note.

    Args:
        x: The batch.

    Yields:
        Nothing; the error propagates with its own type.
    """
    try:
        yield
    except RuntimeError as error:
        annotate_network_error(error, x)
        raise


def annotate_network_error(error: Exception, x: "Tensor") -> None:
    """Add a note with the shape of the batch and a hint to a ``RuntimeError`` of a network, unless it has one.

    Args:
        error: What the network raised; other errors are left as they are.
        x: The batch.
    """
    if isinstance(error, RuntimeError) and not any(n.startswith(_NOTE) for n in getattr(error, "__notes__", ())):
        error.add_note(
            f"{_NOTE} {tuple(x.shape)}: resize the images to what the network expects, or use smaller batches if "
            "memory ran out."
        )


def is_user_error(error: BaseException) -> bool:
    """Return whether an exception is a mistake that its message alone lets the user fix.

    Any other exception is a bug, in the library or in a network, and needs its traceback.

    Args:
        error: The exception.

    Returns:
        True for the errors of this module, those of the operating system, the names of missing packages, and memory of
        an accelerator that a model has explained.
    """
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        return error.__cause__ is not None
    if isinstance(error, ImportError):
        return error.name is None  # raised by the library to say what to install; Python's own errors carry a name
    return isinstance(error, InputError | ConfigError | CheckpointError | DataError | OSError)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the known name that a mistyped one resembles most, as the continuation of an error message.

    Args:
        name: What was given.
        known: What would have been valid.

    Returns:
        A question in parentheses that starts with a space, or an empty text if nothing resembles the name.

    >>> "there is no method 'cota'" + did_you_mean("cota", ["tent", "cotta"])
    "there is no method 'cota' (did you mean 'cotta'?)"
    """
    lowered = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[matches[0]]!r}?)" if matches else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its final period, to quote it in another message.

    Args:
        error: The exception.

    Returns:
        The line; the name of the exception's class if it has no message.
    """
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
