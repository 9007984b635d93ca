"""Detect from pixels that a stream enters a new domain (VANE)."""

import math

import torch
from torch import Tensor

from ctta.core.state import HostModule
from ctta.functional import at_least_float32

#: Images that the appearance of a domain and the recent appearance average over, and the fewest of a known domain.
DOMAIN_MEMORY, RECENT_MEMORY, MIN_IMAGES = 1000, 16, 16
#: Lower bound of the variance between images: of means relative to the variance of pixels, of logarithms as it is.
MIN_VARIANCE = 0.1
TINY = 1e-4  # added to the variance of pixels before the logarithm


class DomainChange(HostModule):
    """Detect when a stream turns from one domain to another, such as from fog to noise.

    Track the mean and variance of the brightness, contrast and sharpness of images over the current domain. The domain
    ends when the mean over recent images is too far from its own. A stream of mixed domains has a large variance, so it
    counts as one domain.

    Args:
        max_distance: The mean squared distance, in variances of single images, up to which a domain goes on; None if
            it never ends. It must allow for batches of one class.
    """

    mean: Tensor
    square: Tensor
    recent: Tensor
    counts: Tensor

    def __init__(self, max_distance: float | None) -> None:
        super().__init__()
        self.max_distance = max_distance
        for name in ("mean", "square", "recent"):
            self.register_lazy_buffer(name, None, dtype=torch.float64)
        # Images of the domain, and recent ones.
        self.register_buffer("counts", torch.zeros(2, dtype=torch.float64, device="cpu"))

    @property
    def num_images(self) -> float:
        """The number of images of the current domain so far, with a decay over :data:`DOMAIN_MEMORY`."""
        return float(self.counts[0])

    @torch.no_grad()
    def follow_(self, features: Tensor) -> bool:
        """Return whether a batch begins a new domain.

        Args:
            features: The result of :func:`measure_appearance` for the whole batch.
        """
        features = features.cpu().double()
        if not features.isfinite().all():
            return False
        if not self.is_allocated:
            self._begin(features)
            return False
        if features.shape[1] != len(self.mean):  # gray images after color, say
            self._begin(features)
            return self.max_distance is not None
        num_new, (num_old, num_recent) = len(features), self.counts.tolist()
        mean, square = features.mean(0), features.square().mean(0)
        kept = math.exp(-num_new / RECENT_MEMORY) * num_recent
        self.recent.copy_(self.recent.lerp(mean, num_new / (kept + num_new)))
        self.counts[1] = kept + num_new
        if self.max_distance is not None and num_old >= MIN_IMAGES and self._measure_distance() > self.max_distance:
            self._begin(features)
            return True
        kept = math.exp(-num_new / DOMAIN_MEMORY) * num_old
        share = num_new / (kept + num_new)
        self.mean.copy_(self.mean.lerp(mean, share))
        self.square.copy_(self.square.lerp(square, share))
        self.counts[0] = kept + num_new
        return False

    def _begin(self, features: Tensor) -> None:
        mean, square = features.mean(0), features.square().mean(0)
        for name, value in (("mean", mean), ("square", square), ("recent", mean.clone())):
            self.allocate_(name, value)
        self.counts.fill_(len(features))

    def _measure_distance(self) -> float:
        mean, square = self.mean, self.square
        brightness, contrast, _ = mean.chunk(3)
        floor = MIN_VARIANCE * torch.cat([contrast.exp(), torch.ones_like(brightness).repeat(2)])
        variance = (square - mean.square()).clamp_min(floor)
        return float(((self.recent - mean).square() / variance).mean())


@torch.no_grad()
def measure_appearance(x: Tensor) -> Tensor:
    """Return the brightness, contrast and sharpness of each channel of each image.

    Args:
        x: Images (N, C, H, W), or inputs of another shape, which count as one row of pixels.

    Returns:
        Features (N, 3C): means, then logarithms of variances, then of squared differences between neighbors.
    """
    x = at_least_float32(x)
    pixels = x if x.ndim == 4 else x.reshape(len(x), 1, 1, -1)
    variance = pixels.var((2, 3), correction=0)
    steps = [pixels.diff(dim=axis).square().mean((2, 3)) for axis in (2, 3) if pixels.shape[axis] > 1]
    sharpness = sum(steps, torch.zeros_like(variance))
    return torch.cat([pixels.mean((2, 3)), (variance + TINY).log(), (sharpness + TINY).log()], 1)
