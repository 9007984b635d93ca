"""A wrapper that lets a network trained on normalized images take images in [0, 1]."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctta.errors import ConfigError, InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize_input(net: nn.Module, spec: str, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Module:
    """Return a network for images in [0, 1] from one that expects normalized ones.

    Args:
        net: The network.
        spec: Its name, as :func:`ctta.models.load` takes it.
        mean: Mean of each channel, or one number for all three; None to return the network as it is.
        std: Standard deviation of each channel, in the same way.

    Returns:
        The network inside :class:`Normalized`.

    Raises:
        ConfigError: Only one of mean and std is given, or the network normalizes its input already.
    """
    if mean is None and std is None:
        return net
    if mean is None or std is None:
        raise ConfigError(f"give mean and std together, got mean {mean} and std {std}")
    if isinstance(net, Normalized) or not spec.removeprefix("sliding:").startswith("file:"):
        raise ConfigError(f"the network {spec!r} normalizes its input itself: leave out mean and std")
    channels = (tuple(values) * (3 if len(values) == 1 else 1) for values in (mean, std))
    return Normalized(net, *channels)


class Normalized(nn.Module):
    """A network that normalizes its input: ``net((x - mean) / std)``.

    Corruptions and augmented views work on images in [0, 1], so normalization belongs inside the network. Mean and
    std are buffers: they move with the network, and networks that differ only in them have different fingerprints.

    Args:
        net: Network that takes normalized images; its output is returned unchanged.
        mean: Mean of each channel.
        std: Standard deviation of each channel; positive.

    >>> net = Normalized(nn.Identity(), mean=[0.5], std=[0.25])
    >>> net(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean or min(std) <= 0:
            raise ConfigError(
                f"expected one mean and one positive std per channel, got mean {tuple(mean)} and std {tuple(std)}"
            )
        self.net = net
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Any:
        """Return the network's output for images (N, C, H, W) in [0, 1]."""
        if x.ndim != 4 or x.shape[1] != len(self.mean):  # broadcasting would turn a gray image into several channels
            raise InputError(f"expected images (N, {len(self.mean)}, height, width), got shape {tuple(x.shape)}")
        return self.net((x - self.mean) / self.std)
