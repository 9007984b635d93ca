"""Views for segmentation: several scales, each with its mirror image."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.errors import ConfigError, InputError
from ctta.nn.surgery import resize
from ctta.views.average import FittingView, Model

#: Larger images are a mistake: they take over 256 times the memory.
MAX_SCALE = 16
#: What to round the sides of an image to, in this order, until a network takes it: strides of usual networks.
MULTIPLES = (2, 4, 8, 16, 32, 64)
#: Images without a negative value and with a larger one than this are in 0 to 255, whatever a network expects.
MAX_VALUE = 16

# The multiple that each network needs, by the size of the images and the scale. What was found is found again by any
# other copy of the network, so this saves time only, and results do not depend on it.
_fits: WeakKeyDictionary[nn.Module, dict[tuple[tuple[int, ...], float], int]] = WeakKeyDictionary()


def multiscale_flip(
    scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), *, multiple_of: int | None = None
) -> tuple["ScaledView", ...]:
    """Return the views of CoTTA's reference implementation for segmentation: each scale, unflipped and flipped.

    Args:
        scales: Factors of height and width; the defaults are the reference's.
        multiple_of: Round the sides of scaled images to multiples of this number, for networks that take no others.
            By default only where the network fails, to the smallest power of two with which it does not.

    Returns:
        Two views per scale.

    Raises:
        ConfigError: There is no scale, or one that is not above 0 and at most 16, or ``multiple_of`` is below 1.

    >>> len(multiscale_flip())
    14
    """
    if not scales:
        raise ConfigError("multiscale_flip needs at least one scale")
    return tuple(ScaledView(float(scale), flip, multiple_of) for scale in scales for flip in (False, True))


@dataclass(frozen=True)
class ScaledView(FittingView):
    """The batch resized and, if asked, flipped horizontally; dense logits are brought back.

    Attributes:
        scale: The factor of height and width, above 0 and at most 16.
        flip: Whether to flip the images horizontally.
        multiple_of: What height and width are rounded to; None for whole pixels, or what the network turns out to need.
    """

    scale: float
    flip: bool
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Real) or not 0 < self.scale <= MAX_SCALE:
            raise ConfigError(f"the scale of a view must be above 0 and at most {MAX_SCALE}, got {self.scale!r}")
        if self.multiple_of is not None and (type(self.multiple_of) is not int or self.multiple_of < 1):
            raise ConfigError(f"multiple_of must be an integer of at least 1, got {self.multiple_of!r}")

    @override
    def __repr__(self) -> str:
        # Folders of 0.1 compare this text, so the later setting is shown only where it is given.
        later = "" if self.multiple_of is None else f", multiple_of={self.multiple_of}"
        return f"ScaledView(scale={self.scale}, flip={self.flip}{later})"

    @override
    def __call__(self, model: Model, x: Tensor) -> Tensor:
        view = self.recall(model, x)
        try:
            logits = model(view.augment(x))
        except Exception as error:
            fitted = view.fit(model, x, error)
            if fitted == view:
                raise
            return fitted(model, x)
        return view.align(logits, x)

    @override
    def augment(self, x: Tensor) -> Tensor:
        return resize(x.flip(-1) if self.flip else x, self._scale_size(x))

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.ndim < x.ndim:
            return logits  # one prediction per image: no position to undo
        if logits.shape[2:] != x.shape[2:]:
            logits = resize(logits, x.shape[2:])
        return logits.flip(-1) if self.flip else logits

    @override
    def recall(self, model: Model, x: Tensor) -> "ScaledView":
        if self.multiple_of is not None or not isinstance(model, nn.Module):
            return self
        multiple = _fits.get(model, {}).get(self._key(x))
        return self if multiple is None else replace(self, multiple_of=multiple)

    @override
    def fit(self, model: Model, x: Tensor, error: Exception) -> "ScaledView":
        if not _may_be_due_to_size(error):
            return self
        for view in self._rounded(x):
            try:
                model(view.augment(x))
            except Exception as other:
                if not _may_be_due_to_size(other):
                    raise
                continue
            if isinstance(model, nn.Module) and view.multiple_of is not None:
                _fits.setdefault(model, {})[self._key(x)] = view.multiple_of
            return view
        flip = ", flip" if self.flip else ""
        pixels = "x".join(map(str, self._scale_size(x)))
        error.add_note(
            f"View scale {self.scale:g}{flip}: the network failed on {pixels} pixels. If it takes only multiples of a "
            "number, give it, such as views=ctta.views.multiscale_flip(multiple_of=32), or give other scales."
        )
        return self

    def check(self, x: Tensor) -> None:
        """Raise an InputError for RGB or gray images in 0 to 255.

        Images in [0, 1] pass, and so do images that were normalized outside the model.

        Args:
            x: The batch.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3) or x.numel() == 0:
            return
        low, high = torch.stack(x.aminmax()).tolist()
        if low >= 0 and high > MAX_VALUE:
            raise InputError(
                f"image values range from {low:.3g} to {high:.3g}, as of images in 0 to 255; expected [0, 1], or "
                "images normalized for the network: divide them by 255, and let a network that takes 0 to 255 multiply "
                "its input itself"
            )

    def _scale_size(self, x: Tensor) -> list[int]:
        """Return the sides of the scaled image."""
        if self.multiple_of is None:
            return [max(1, round(side * self.scale)) for side in x.shape[2:]]
        return [self.multiple_of * max(1, round(side * self.scale / self.multiple_of)) for side in x.shape[2:]]

    def _rounded(self, x: Tensor) -> list["ScaledView"]:
        """Return this view with every multiple that gives it another size, each size once."""
        if self.multiple_of is not None:
            return []
        views: dict[tuple[int, ...], ScaledView] = {}
        for multiple in MULTIPLES:
            view = replace(self, multiple_of=multiple)
            views.setdefault(tuple(view._scale_size(x)), view)
        tried = {tuple(self._scale_size(x)), tuple(x.shape[2:])}  # at its own size an image would only be repeated
        return [view for size, view in views.items() if size not in tried]

    def _key(self, x: Tensor) -> tuple[tuple[int, ...], float]:
        return tuple(x.shape[2:]), self.scale


def _may_be_due_to_size(error: Exception) -> bool:
    """Return whether a network can have failed since it does not take the size of its input."""
    own = InputError | ConfigError | torch.OutOfMemoryError
    return isinstance(error, RuntimeError | ValueError | AssertionError) and not isinstance(error, own)
