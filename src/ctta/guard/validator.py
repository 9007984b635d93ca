"""What a stream may be fed: shape, dtype and range of the inputs, declared once or learnt from the first batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctta.validation import check_batch_format

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
MOST_AXES = 6  # of one input; the learnt shape is kept in a buffer of fixed size
USUAL_RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))


@dataclass(frozen=True)
class Admission:
    """What one input must be like; what is left out is learnt from the first batch that was adapted to.

    Args:
        shape: of one input, without the batch axis; None for an axis that may have any size: ``(3, None, None)``.
        dtype: such as ``"float32"``.
        low: the smallest value that is no fault.
        high: the largest. Learnt, the range is the first of [0, 1], [-1, 1] and [0, 255] that holds the first batch,
            and if none does its own range with its width added at either end.
        learn: False to check only what is declared here, and that values are finite.
        any_size: learn the number of axes and of channels, but not the sizes of the axes after them.

    >>> Admission(shape=(3, 32, 32), low=0, high=1).any_size
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
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.shape is not None and not 1 <= len(self.shape) <= MOST_AXES:
            raise ValueError(f"shape must have 1 to {MOST_AXES} axes, without that of the batch, got {self.shape!r}")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low must be below high, got low={self.low!r} and high={self.high!r}")


class Door(nn.Module):
    """Checks inputs by an :class:`Admission`, and remembers what it learnt from the first batch."""

    shape: Tensor
    num_axes: Tensor
    dtype: Tensor
    bounds: Tensor

    def __init__(self, admission: Admission) -> None:
        super().__init__()
        self.admission = admission
        self.register_buffer("shape", torch.full((MOST_AXES,), -1))  # -1: any size, or no such axis
        self.register_buffer("dtype", torch.tensor(-1))
        self.register_buffer("bounds", torch.tensor([-torch.inf, torch.inf]))
        self.register_buffer("num_axes", torch.tensor(-1))

    def check(self, x: Tensor, *, rows: bool) -> None:
        """Refuse a batch of another kind and, if asked, one with bad rows."""
        check_batch_format(x)
        name = str(x.dtype).removeprefix("torch.")
        expected = self.admission.dtype or (list(DTYPES)[int(self.dtype)] if self.dtype >= 0 else None)
        if expected is not None and name != expected:
            raise TypeError(f"this stream takes {expected}, got {name}: call x.to(torch.{expected})")
        self._check_shape(tuple(x.shape[1:]))
        if rows and not (good := self.good_rows(x)).all():
            low, high = self.expected_range
            raise ValueError(
                f"{int((~good).sum())} of {len(x)} inputs hold NaN or values outside [{low:g}, {high:g}], which this "
                "stream takes; nothing was predicted or changed: drop or repair them, declare another range, or have "
                "the source answer them with bad_rows='source'"
            )

    def _check_shape(self, found: tuple[int, ...]) -> None:
        shape = self.expected_shape
        if shape is None:
            return
        if len(shape) != len(found) or any(size not in (None, other) for size, other in zip(shape, found, strict=True)):
            wanted = "x".join("any" if size is None else str(size) for size in shape)
            given = "x".join(map(str, found))
            raise ValueError(
                f"this stream takes inputs of {wanted}, got {given}: resize them, or declare what may come, such as "
                "admission=Admission(shape=(3, None, None))"
            )

    @torch.no_grad()
    def good_rows(self, x: Tensor) -> Tensor:
        """Which inputs of a batch are finite and within the range."""
        if x.numel() == 0:
            return torch.ones(len(x), dtype=torch.bool, device=x.device)
        smallest, largest = torch.aminmax(x.flatten(1), dim=1)
        low, high = self.expected_range
        good = torch.isfinite(smallest) & torch.isfinite(largest)
        return good & (smallest >= low) & (largest <= high)

    @torch.no_grad()
    def learn(self, x: Tensor) -> None:
        """From a batch that went well; only the first teaches anything."""
        if not self.admission.learn or self.dtype >= 0:
            return
        name = str(x.dtype).removeprefix("torch.")
        self.dtype.fill_(list(DTYPES).index(name))
        if self.num_axes < 0:
            if x.ndim <= MOST_AXES + 1:
                known = 1 if self.admission.any_size else x.ndim - 1
                self.shape[:known] = torch.tensor(x.shape[1 : 1 + known])
                self.num_axes.fill_(x.ndim - 1)
            low, high = float(x.min()), float(x.max())
            fitting = [usual for usual in USUAL_RANGES if usual[0] <= low and high <= usual[1]]
            learnt = fitting[0] if fitting else (low - (high - low), high + (high - low))
            self.bounds.copy_(torch.tensor(learnt))

    def forget_dtype(self) -> None:
        """After the networks were moved to another."""
        self.dtype.fill_(-1)

    @property
    def expected_shape(self) -> tuple[int | None, ...] | None:
        if self.admission.shape is not None:
            return tuple(self.admission.shape)
        if self.num_axes < 0:
            return None
        return tuple(None if size < 0 else size for size in self.shape[: int(self.num_axes)].tolist())

    @property
    def expected_range(self) -> tuple[float, float]:
        low, high = self.bounds.tolist()
        return low if self.admission.low is None else self.admission.low, (
            high if self.admission.high is None else self.admission.high
        )
