"""The views for classification: colour, affine, blur, flip and noise, as the authors of CoTTA draw them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctta.views.average import Model
from ctta.views.colour import adjust_contrast, adjust_gamma, adjust_hue, adjust_saturation
from ctta.views.geometry import Motion

#: Undoing a normalisation in half precision misses [0, 1] by about this much.
RANGE_SLACK = 1e-2


def image_views(
    n: int = 32, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> "ImageViews":
    """CoTTA's n random views for classification: colour, affine, blur, flip and noise.

    Images are RGB or grey in [0, 1]. For images normalised outside the model give the ``mean`` and ``std`` of that
    normalisation: a view then undoes it, augments, and normalises again.

    >>> views = image_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 3, 8, 8)).shape for view in views]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    if n < 1:
        raise ValueError(f"image_views needs at least one view, got {n}; for none at all give views=()")
    means, stds = (None if values is None else tuple(float(value) for value in values) for values in (mean, std))
    if (means is None) != (stds is None) or (means and stds and len(means) != len(stds)):
        raise ValueError(f"give mean and std together, one value per channel each, got {mean!r} and {std!r}")
    if stds is not None and min(stds) <= 0:
        raise ValueError(f"std must be above 0, got {std!r}")
    return ImageViews(n, mean=means, std=stds)


@dataclass(frozen=True)
class ImageViews:
    """See :func:`image_views`."""

    n: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def draw(self, generator: torch.Generator) -> list["ImageView"]:
        # The images are the same for all views of a step, so only the first looks at their range.
        return [ImageView.draw(self, generator, checks_range=number == 0) for number in range(self.n)]

    def check(self, x: Tensor) -> None:
        """Raise unless x is a batch of images in the declared range."""
        if len(x) == 0:
            return
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            hint = (
                "for one image call x.unsqueeze(0)" if x.ndim == 3 else "for other data give views of your own, or ()"
            )
            raise ValueError(
                f"image views take RGB or grey images (N, 3 or 1, H, W), got shape {tuple(x.shape)}: {hint}"
            )
        if self.mean is not None and len(self.mean) != x.shape[1]:
            raise ValueError(f"mean and std are for {len(self.mean)} channels, and the images have {x.shape[1]}")
        low, high = torch.stack(self.to_unit(x).aminmax()).tolist()
        if low < -RANGE_SLACK or high > 1 + RANGE_SLACK:
            declared = "after undoing mean and std" if self.mean else "as no mean and std were given"
            raise ValueError(
                f"image values run from {low:.3g} to {high:.3g}, and image views expect [0, 1] {declared}; for images "
                "normalised outside the model use views=image_views(n, mean=..., std=...) with that normalisation"
            )

    def to_unit(self, x: Tensor) -> Tensor:
        """Undo the normalisation outside the model."""
        return x if self.mean is None or self.std is None else x * _channels(self.std, x) + _channels(self.mean, x)

    def from_unit(self, x: Tensor) -> Tensor:
        """Normalise as outside the model."""
        return x if self.mean is None or self.std is None else (x - _channels(self.mean, x)) / _channels(self.std, x)


def _channels(values: tuple[float, ...], x: Tensor) -> Tensor:
    return x.new_tensor(values).view(1, -1, 1, 1)


@dataclass(frozen=True)
class ImageView:
    """One draw of the parameters of a view, shared by all images of the batch; deterministic."""

    views: ImageViews
    checks_range: bool
    colour_order: tuple[int, ...]
    brightness: float
    contrast: float
    saturation: float
    hue: float
    gamma: float
    degrees: float
    #: As a share of the padded size, which is twice the image's.
    translate_x: float
    translate_y: float
    scale: float
    sigma: float
    flip: bool
    noise_seed: int

    NOISE = 0.005

    @classmethod
    def draw(cls, views: ImageViews, generator: torch.Generator, *, checks_range: bool = True) -> "ImageView":
        def uniform(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

        return cls(
            views=views,
            checks_range=checks_range,
            colour_order=tuple(torch.randperm(5, generator=generator).tolist()),
            brightness=uniform(0.6, 1.4),
            contrast=uniform(0.7, 1.3),
            saturation=uniform(0.5, 1.5),
            hue=uniform(-0.06, 0.06),
            gamma=uniform(0.7, 1.3),
            degrees=uniform(-15, 15),
            translate_x=uniform(-1 / 16, 1 / 16),
            translate_y=uniform(-1 / 16, 1 / 16),
            scale=uniform(0.9, 1.1),
            sigma=uniform(0.001, 0.5),
            flip=uniform(0, 1) < 0.5,
            noise_seed=int(torch.randint(2**62, (), generator=generator)),
        )

    def __call__(self, model: Model, x: Tensor) -> Tensor:
        logits = model(self.augment(x))
        if logits.ndim < x.ndim:
            return logits  # one answer per image
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._motion(x).undo(exact.flip(-1) if self.flip else exact).to(logits.dtype)

    def augment(self, x: Tensor) -> Tensor:
        """The batch as this view shows it."""
        if self.checks_range:
            self.views.check(x)
        # 16 bits are too few for positions in a large image, and sampling by them is unsound on the CPU.
        image = self.views.to_unit(x.to(torch.promote_types(x.dtype, torch.float32))).clamp(0, 1)
        image = self._colour(image)
        image = self._motion(image).apply(image, margin=self._blur_radius(image.dtype))
        image = self._blur(image)
        if self.flip:
            image = image.flip(-1)
        # A generator of its own on the batch's device keeps the view deterministic without a copy from the CPU.
        generator = torch.Generator(x.device).manual_seed(self.noise_seed)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=image.dtype)
        return self.views.from_unit((image + self.NOISE * noise).clamp(0, 1)).to(x.dtype)

    def _colour(self, image: Tensor) -> Tensor:
        for step in self.colour_order:
            match step:
                case 0:
                    image = (image * self.brightness).clamp(0, 1)
                case 1:
                    image = adjust_contrast(image, self.contrast)
                case 2:
                    image = adjust_saturation(image, self.saturation)
                case 3:
                    image = adjust_hue(image, self.hue)
                case 4:
                    image = adjust_gamma(image, self.gamma)
        return image

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
        for axis in (2, 3):
            size = image.shape[axis] - 2 * radius
            blurred = image.narrow(axis, radius, size) * taps[0]
            for offset in range(1, radius + 1):
                both = image.narrow(axis, radius - offset, size) + image.narrow(axis, radius + offset, size)
                blurred = blurred.add(both, alpha=taps[offset])
            image = blurred
        return image
