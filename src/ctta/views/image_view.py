"""One view for classification: color, affine motion, blur, flip and noise with fixed parameters."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ctta.core.parallel import current_reducer
from ctta.errors import InputError
from ctta.functional import at_least_float32
from ctta.views.average import SplitView
from ctta.views.transforms import (
    Motion,
    Padding,
    adjust_brightness_,
    adjust_contrast_,
    adjust_gamma_,
    adjust_hue_,
    adjust_saturation_,
)

#: Undoing a normalization in half precision misses [0, 1] by about this much.
RANGE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class ImageNormalization:
    """The normalization of images outside the model, ``(image - mean) / std``; None if they are in [0, 1].

    Attributes:
        mean: One value per channel.
        std: One value per channel.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def check(self, x: Tensor) -> None:
        """Raise an InputError unless x is a batch of images with values in the declared range."""
        if len(x) == 0:
            return
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            hint = (
                "for one image call x.unsqueeze(0)" if x.ndim == 3 else "for other data give views of your own, or ()"
            )
            raise InputError(
                f"image views take RGB or gray images (N, 3 or 1, H, W), got shape {tuple(x.shape)}: {hint}"
            )
        if self.mean is not None and len(self.mean) != x.shape[1]:
            raise InputError(f"mean and std are for {len(self.mean)} channels, and the images have {x.shape[1]}")
        low, high = torch.stack(self.undo(x).aminmax()).tolist()
        if low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
            declared = "after undoing mean and std" if self.mean else "as no mean and std were given"
            raise InputError(
                f"image values range from {low:.3g} to {high:.3g}, and image views expect [0, 1] {declared}; for "
                "images normalized outside the model use views=image_views(mean=..., std=...) with that "
                "normalization (or fast_image_views)"
            )

    # Both use Python numbers: creating a tensor of them for each view would make a GPU wait for the CPU.

    def undo(self, x: Tensor) -> Tensor:
        """Return the images in [0, 1]."""
        if self.mean is None or self.std is None:
            return x
        image = x.clone()
        for channel, mean, std in zip(image.unbind(1), self.mean, self.std, strict=True):
            channel.mul_(std).add_(mean)
        return image

    def apply_(self, image: Tensor) -> None:
        """Normalize images in [0, 1]."""
        if self.mean is not None and self.std is not None:
            for channel, mean, std in zip(image.unbind(1), self.mean, self.std, strict=True):
                channel.sub_(mean).div_(std)


@dataclass(frozen=True)
class ImageView(SplitView):
    """One draw of the parameters of a view, shared by all images of the batch; deterministic.

    Attributes:
        normalization: How the images were normalized outside the model.
        check_range: Whether to check the range of values first.
        color_order: The order of the five changes of color below, as indices.
        brightness: Factor of all values.
        contrast: Factor of the distance from the mean luma of an image.
        saturation: Factor of the distance from the luma of a pixel.
        hue: Rotation of the hue, in turns.
        gamma: Exponent of all values.
        degrees: Rotation of the image.
        translate_x: Translation as a fraction of the padded width.
        translate_y: Translation as a fraction of the padded height.
        scale: Scaling of the image.
        sigma: Standard deviation of the Gaussian blur, in pixels.
        flip: Whether to flip the image horizontally.
        noise_seed: Seed of the Gaussian noise.
        blur_and_noise: Whether to blur and to add noise.
        padding: How the image goes on beyond its edges, ``"edge"`` or ``"reflect"``.
    """

    normalization: ImageNormalization
    check_range: bool
    color_order: tuple[int, ...]
    brightness: float
    contrast: float
    saturation: float
    hue: float
    gamma: float
    degrees: float
    translate_x: float
    translate_y: float
    scale: float
    sigma: float
    flip: bool
    noise_seed: int
    blur_and_noise: bool = True
    padding: Padding = "edge"

    #: Standard deviation of the noise.
    NOISE: ClassVar[float] = 0.005

    @override
    def augment(self, x: Tensor) -> Tensor:
        if self.check_range:
            self.normalization.check(x)
        # 16 bits are too few for positions in a large image, and torch samples by them unsoundly on the CPU.
        image = self.normalization.undo(at_least_float32(x)).clamp(0, 1)
        self._adjust_color_(image)
        image = self._motion(image).apply(image, margin=self._blur_radius(image.dtype))
        image = self._blur(image)
        if self.flip:
            image = image.flip(-1)
        if self.blur_and_noise:
            # A separate generator on the batch's device keeps the view deterministic without a copy from the CPU.
            generator = torch.Generator(x.device).manual_seed(self.noise_seed)
            image.add_(current_reducer().randn_like(image, generator), alpha=self.NOISE)
        image.clamp_(0, 1)
        self.normalization.apply_(image)
        return image.to(x.dtype)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return self._motion(x).align(logits, x, self.flip)

    def _adjust_color_(self, image: Tensor) -> None:
        adjustments = (
            (adjust_brightness_, self.brightness),
            (adjust_contrast_, self.contrast),
            (adjust_saturation_, self.saturation),
            (adjust_hue_, self.hue),
            (adjust_gamma_, self.gamma),
        )
        for index in self.color_order:
            adjust_, amount = adjustments[index]
            adjust_(image, amount)

    def _motion(self, image: Tensor) -> Motion:
        height, width = image.shape[2:]
        padded_width, padded_height = width + 2 * (width // 2), height + 2 * (height // 2)
        right, down = round(self.translate_x * padded_width), round(self.translate_y * padded_height)
        return Motion(self.degrees, self.scale, right, down, self.padding)

    @property
    def _blur_taps(self) -> list[float]:
        """The weights of a 5-tap Gaussian, from the center outwards."""
        taps = [math.exp(-0.5 * (offset / self.sigma) ** 2) for offset in range(3)]
        return [tap / (taps[0] + 2 * taps[1] + 2 * taps[2]) for tap in taps]

    def _blur_radius(self, dtype: torch.dtype) -> int:
        """Return how many taps beside the center are above rounding error: for most draws none or one."""
        return self.blur_and_noise * sum(tap > torch.finfo(dtype).eps / 4 for tap in self._blur_taps[1:])

    def _blur(self, image: Tensor) -> Tensor:
        """Blur by shifted sums along one axis and then the other, which consumes the margin."""
        radius, taps = self._blur_radius(image.dtype), self._blur_taps
        if radius == 0:
            return image
        for axis in (2, 3):
            size = image.shape[axis] - 2 * radius
            blurred = image.narrow(axis, radius, size) * taps[0]
            for offset in range(1, radius + 1):
                for start in (radius - offset, radius + offset):
                    blurred.add_(image.narrow(axis, start, size), alpha=taps[offset])
            image = blurred
        return image
