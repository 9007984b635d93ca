"""What a call of a network is about, besides its input: how BatchNorms compute their statistics in it.

These are properties of the call, not of a layer: a layer serves calls of any size, on any number of views.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

#: The mean and the variance that each BatchNorm of a network normalized by.
RecordedStatistics = dict[nn.Module, tuple[Tensor, Tensor]]

# None outside of the contexts below.
_num_parts: ContextVar[int | None] = ContextVar("_num_parts", default=None)
_num_images: ContextVar[int | None] = ContextVar("_num_images", default=None)
_fraction: ContextVar[float | None] = ContextVar("_fraction", default=None)
_record: ContextVar[RecordedStatistics | None] = ContextVar("_record", default=None)
_reference: ContextVar[Mapping[nn.Module, tuple[Tensor, Tensor]] | None] = ContextVar("_reference", default=None)


@contextmanager
def separate_statistics(num_parts: int) -> Iterator[None]:
    """Treat a batch as ``num_parts`` equal parts, each normalized by its own batch statistics."""
    token = _num_parts.set(num_parts)
    try:
        yield
    finally:
        _num_parts.reset(token)


@contextmanager
def count_images(num_images: int) -> Iterator[None]:
    """Let layers that blend by the size of a batch do so for this many images, however many rows reach a layer."""
    token = _num_images.set(num_images)
    try:
        yield
    finally:
        _num_images.reset(token)


def images_in_batch() -> int | None:
    """Return the number of images of the step in progress; None outside of :func:`count_images`."""
    return _num_images.get()


@contextmanager
def blend_statistics(fraction: float) -> Iterator[None]:
    """Use this fraction of the batch in every BatchNorm that uses batch statistics, whatever its own fraction.

    With 0 these layers use their running statistics. A layer that keeps none uses the batch's in any case.
    """
    token = _fraction.set(fraction)
    try:
        yield
    finally:
        _fraction.reset(token)


@contextmanager
def record_statistics() -> Iterator[RecordedStatistics]:
    """Record what the BatchNorms of a network normalize by in a call without gradients.

    Yields:
        The statistics, which a call of the network within the context fills.
    """
    recorded: RecordedStatistics = {}
    token = _record.set(recorded)
    try:
        yield recorded
    finally:
        _record.reset(token)


@contextmanager
def blend_with_recorded(recorded: RecordedStatistics, fraction: float) -> Iterator[None]:
    """Normalize by (1-fraction) * recorded + fraction * batch statistics, in the network that was recorded."""
    token = _reference.set(recorded)
    try:
        with blend_statistics(fraction):
            yield
    finally:
        _reference.reset(token)


def current_record() -> RecordedStatistics | None:
    """Return where to record statistics; None outside of :func:`record_statistics`."""
    return _record.get()


def current_reference() -> Mapping[nn.Module, tuple[Tensor, Tensor]] | None:
    """Return the recorded statistics to blend with; None outside of :func:`blend_with_recorded`."""
    return _reference.get()


def current_num_parts() -> int | None:
    """Return the number of parts with statistics of their own; None outside of :func:`separate_statistics`."""
    return _num_parts.get()


def current_fraction() -> float | None:
    """Return the fraction that every layer uses; None outside of :func:`blend_statistics`."""
    return _fraction.get()


def uses_recorded_statistics() -> bool:
    """Return whether the call in progress records statistics or blends with recorded ones."""
    return _record.get() is not None or _reference.get() is not None


def has_own_statistics_context() -> bool:
    """Return whether the call in progress has other statistics than those of its batch as a whole, or records them."""
    return any(variable.get() is not None for variable in (_num_parts, _fraction, _record))
