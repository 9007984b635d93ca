"""Images in [0, 1], perhaps behind a normalisation outside the model."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Undoing a normalisation in half precision misses [0, 1] by about this much.
RANGE_SLACK = 1e-2


@dataclass(frozen=True)
class UnitRange:
    """How the images of a batch relate to [0, 1]: as they are, or normalised by a mean and a std per channel."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

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
                "normalised outside the model use views=image_views(n, mean=..., std=...) with that normalisation (or "
                "fast_image_views)"
            )

    # By numbers and not by a tensor of them: making one for each view would have a GPU wait for the CPU.

    def to_unit(self, x: Tensor) -> Tensor:
        """Undo the normalisation outside the model."""
        if self.mean is None or self.std is None:
            return x
        unit = x.clone()
        for channel, mean, std in zip(unit.unbind(1), self.mean, self.std, strict=True):
            channel.mul_(std).add_(mean)
        return unit

    def from_unit_(self, image: Tensor) -> None:
        """Normalise as outside the model."""
        if self.mean is not None and self.std is not None:
            for channel, mean, std in zip(image.unbind(1), self.mean, self.std, strict=True):
                channel.sub_(mean).div_(std)
