"""What a stream accepts: shape, dtype and range of the inputs, declared or learned from the first batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctta.core.parallel import check_flag
from ctta.core.state import CpuState
from ctta.core.validation import check_number
from ctta.errors import ConfigError, InputError
from ctta.nn.surgery import check_batch_format

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
MAX_AXES = 6  # of one input; the learned shape is kept in a buffer of fixed size
COMMON_RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))


@dataclass(frozen=True)
class InputSpec:
    """Requirements on each input; what is not declared is learned from the first batch that was adapted to.

    Attributes:
        shape: Shape of one input, without the batch axis; None for an axis of any size: ``(3, None, None)``.
        dtype: Name of the dtype, such as ``"float32"``.
        low: Smallest valid value.
        high: Largest valid value. A learned range is the first of [0, 1], [-1, 1] and [0, 255] that contains the
            first batch, and otherwise the batch's own range, extended by its width at both ends.
        learn: Whether to learn what is not declared. If False, only the declared properties are checked, and that
            values are finite.
        any_size: Whether to learn the number of axes and channels, but not the sizes of the axes after them.

    >>> InputSpec(shape=(3, 32, 32), low=0, high=1).any_size
    False
    """

    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    low: float | None = None
    high: float | None = None
    learn: bool = True
    any_size: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.shape is not None and not _is_shape(self.shape):
            raise ConfigError(
                f"shape must have 1 to {MAX_AXES} axes, without the batch axis, each a size or None; got {self.shape!r}"
            )
        for name in ("low", "high"):
            if (bound := getattr(self, name)) is not None:
                check_number(name, bound)
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"low must be below high, got low={self.low!r} and high={self.high!r}")


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, Sequence)
        and 1 <= len(shape) <= MAX_AXES
        and all(size is None or (type(size) is int and size > 0) for size in shape)
    )


class InvalidValuesError(InputError):
    """A batch with values that a stream does not accept."""


class InputValidator(CpuState):
    """Check inputs against an :class:`InputSpec` and what was learned from the first batch."""

    shape: Tensor
    num_axes: Tensor
    dtype: Tensor
    bounds: Tensor

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("shape", torch.full((MAX_AXES,), -1))  # -1: any size, or no such axis
        self.register_buffer("dtype", torch.tensor(-1))
        self.register_buffer("bounds", torch.tensor([-torch.inf, torch.inf]))
        self.register_buffer("num_axes", torch.tensor(-1))

    def check(self, x: Tensor, *, check_values: bool) -> None:
        """Raise for a batch of a wrong dtype or shape or, if these are to be checked, with invalid values.

        Raises:
            InvalidValuesError: At once, or with the next :func:`ctta.core.parallel.read_flags` of the step in progress.
        """
        check_batch_format(x)
        name = str(x.dtype).removeprefix("torch.")
        expected = self.spec.dtype or (list(DTYPES)[int(self.dtype)] if self.dtype >= 0 else None)
        if expected is not None and name != expected:
            raise TypeError(f"this stream takes {expected}, got {name}: call x.to(torch.{expected})")
        self._check_shape(tuple(x.shape[1:]))
        if not check_values:
            return
        valid = self.valid_rows(x)

        def make_error() -> InputError:
            low, high = self.expected_range
            return InvalidValuesError(
                f"{int((~valid).sum())} of {len(x)} inputs hold NaN or values outside [{low:g}, {high:g}], the range "
                "of this stream; nothing was predicted or changed: drop or repair them, declare another range, or let "
                "the source predict them with bad_rows='source'"
            )

        check_flag(valid.all(), make_error)

    def _check_shape(self, found: tuple[int, ...]) -> None:
        shape = self.expected_shape
        if shape is None:
            return
        if len(shape) != len(found) or any(size not in (None, other) for size, other in zip(shape, found, strict=True)):
            expected = "x".join("any" if size is None else str(size) for size in shape)
            given = "x".join(map(str, found))
            raise InputError(
                f"this stream takes inputs of {expected}, got {given}: resize them, or declare the shape, for instance "
                "input_spec=InputSpec(shape=(3, None, None))"
            )

    @torch.no_grad()
    def valid_rows(self, x: Tensor) -> Tensor:
        """Return a mask of the inputs of a batch that are finite and within the range."""
        if x.numel() == 0:
            return torch.ones(len(x), dtype=torch.bool, device=x.device)
        smallest, largest = torch.aminmax(x.flatten(1), dim=1)
        low, high = self.expected_range
        finite = torch.isfinite(smallest) & torch.isfinite(largest)
        return finite & (smallest >= low) & (largest <= high)

    @torch.no_grad()
    def learn_(self, x: Tensor) -> None:
        """Learn what is not declared from a batch that was processed without errors; only the first one counts."""
        if not self.spec.learn or self.dtype >= 0:
            return
        name = str(x.dtype).removeprefix("torch.")
        self.dtype.fill_(list(DTYPES).index(name))
        if self.num_axes < 0:
            if x.ndim <= MAX_AXES + 1:
                num_known = 1 if self.spec.any_size else x.ndim - 1
                self.shape[:num_known] = torch.tensor(x.shape[1 : 1 + num_known])
                self.num_axes.fill_(x.ndim - 1)
            low, high = torch.stack(torch.aminmax(x)).tolist()
            containing = [common for common in COMMON_RANGES if common[0] <= low and high <= common[1]]
            learned = containing[0] if containing else (low - (high - low), high + (high - low))
            self.bounds.copy_(torch.tensor(learned))

    def forget_dtype_(self) -> None:
        """Accept any dtype again until the next batch, after the networks were converted to another one."""
        self.dtype.fill_(-1)

    @property
    def expected_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one input, None if it is not known yet."""
        if self.spec.shape is not None:
            return tuple(self.spec.shape)
        if self.num_axes < 0:
            return None
        return tuple(None if size < 0 else size for size in self.shape[: int(self.num_axes)].tolist())

    @property
    def expected_range(self) -> tuple[float, float]:
        """Smallest and largest valid value."""
        low, high = self.bounds.tolist()
        return low if self.spec.low is None else self.spec.low, high if self.spec.high is None else self.spec.high
