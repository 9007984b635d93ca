"""One view for classification: colour, affine, blur, flip and noise, with all its parameters drawn."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctta.functional import at_least_float32
from ctta.parallel import current_reducer
from ctta.views.average import Model
from ctta.views.color import (
    adjust_brightness_,
    adjust_contrast_,
    adjust_gamma_,
    adjust_hue_,
    adjust_saturation_,
)
from ctta.views.geometry import Motion
from ctta.views.unit_range import UnitRange


@dataclass(frozen=True)
class ImageView:
    """One draw of the parameters of a view, shared by all images of the batch; deterministic."""

    unit_range: UnitRange
    checks_range: bool
    colour_order: tuple[int, ...]
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

    NOISE = 0.005

    def __call__(self, model: Model, x: Tensor) -> Tensor:
        return self.align(model(self.augment(x)), x)

    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        """The answer to the view of this batch, each pixel's where it is in the batch."""
        if logits.ndim < x.ndim:
            return logits  # one answer per image
        exact = at_least_float32(logits)
        return self._motion(x).undo(exact.flip(-1) if self.flip else exact).to(logits.dtype)

    def augment(self, x: Tensor) -> Tensor:
        """The batch as this view shows it."""
        if self.checks_range:
            self.unit_range.check(x)
        # 16 bits are too few for positions in a large image, and sampling by them is unsound on the CPU.
        image = self.unit_range.to_unit(at_least_float32(x)).clamp(0, 1)
        self._colour_(image)
        image = self._motion(image).apply(image, margin=self._blur_radius(image.dtype))
        image = self._blur(image)
        if self.flip:
            image = image.flip(-1)
        # A generator of its own on the batch's device keeps the view deterministic without a copy from the CPU.
        generator = torch.Generator(x.device).manual_seed(self.noise_seed)
        noise = current_reducer().randn_like(image, generator)
        image.add_(noise, alpha=self.NOISE).clamp_(0, 1)
        self.unit_range.from_unit_(image)
        return image.to(x.dtype)

    def _colour_(self, image: Tensor) -> None:
        for step in self.colour_order:
            match step:
                case 0:
                    adjust_brightness_(image, self.brightness)
                case 1:
                    adjust_contrast_(image, self.contrast)
                case 2:
                    adjust_saturation_(image, self.saturation)
                case 3:
                    adjust_hue_(image, self.hue)
                case 4:
                    adjust_gamma_(image, self.gamma)

    @property
    def _blur_taps(self) -> list[float]:
        """Weights of the 5-tap gaussian from the centre outwards: centre, next, next but one."""
        taps = [math.exp(-0.5 * (offset / self.sigma) ** 2) for offset in range(3)]
        return [tap / (taps[0] + 2 * taps[1] + 2 * taps[2]) for tap in taps]

    def _blur_radius(self, dtype: torch.dtype) -> int:
        """How many taps beside the centre are not lost to rounding: for most draws none or one."""
        return sum(tap > torch.finfo(dtype).eps / 4 for tap in self._blur_taps[1:])

    def _motion(self, image: Tensor) -> Motion:
        height, width = image.shape[2:]
        padded_width, padded_height = width + 2 * (width // 2), height + 2 * (height // 2)
        right, down = round(self.translate_x * padded_width), round(self.translate_y * padded_height)
        return Motion(self.degrees, self.scale, right, down)

    def _blur(self, image: Tensor) -> Tensor:
        """5x5 gaussian blur as shifted sums, along one axis and then the other, which eats the margin."""
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
