"""ResNeXt-29, the network of the CIFAR100-C benchmark, with the keys of AugMix's and RobustBench's files."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.errors import ConfigError


class ResNeXt29(nn.Module):
    """ResNeXt-29 for 32x32 images in [0, 1], which it normalizes itself: (x - 0.5) / 0.5.

    Three stages of three blocks, each a grouped 3x3 convolution between two 1x1 ones. The default has 6,900,132
    parameters. Larger images work too: the last average is over the whole feature map, 8x8 for 32x32 images.

    Args:
        num_classes: Number of logits.
        cardinality: Number of groups of the 3x3 convolutions.
        base_width: Channels per group, in 64ths of the stage's 64, 128 or 256.

    Reference: Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", CVPR 2017.

    >>> net = ResNeXt29(num_classes=5, cardinality=2, base_width=4).eval()
    >>> net(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    mu: Tensor
    sigma: Tensor

    def __init__(self, num_classes: int = 100, cardinality: int = 4, base_width: int = 32) -> None:
        super().__init__()
        if min(num_classes, cardinality, base_width) < 1:
            raise ConfigError(
                "num_classes, cardinality and base_width must be at least 1, "
                f"got {num_classes}, {cardinality} and {base_width}"
            )
        self.register_buffer("mu", torch.full((1, 3, 1, 1), 0.5))
        self.register_buffer("sigma", torch.full((1, 3, 1, 1), 0.5))
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)
        inner = [cardinality * (channels * base_width // 64) for channels in (64, 128, 256)]
        self.stage_1 = _make_stage(64, inner[0], 256, cardinality, stride=1)
        self.stage_2 = _make_stage(256, inner[1], 512, cardinality, stride=2)
        self.stage_3 = _make_stage(512, inner[2], 1024, cardinality, stride=2)
        self.classifier = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, 3, H, W) in [0, 1]."""
        x = F.relu(self.bn_1(self.conv_1_3x3((x - self.mu) / self.sigma)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        return cast(Tensor, self.classifier(x.mean((2, 3))))


def _make_stage(
    in_channels: int, inner_channels: int, out_channels: int, cardinality: int, *, stride: int
) -> nn.Sequential:
    first = ResNeXtBottleneck(in_channels, inner_channels, out_channels, cardinality, stride=stride)
    return nn.Sequential(
        first, *(ResNeXtBottleneck(out_channels, inner_channels, out_channels, cardinality, stride=1) for _ in range(2))
    )


class ResNeXtBottleneck(nn.Module):
    """A 1x1, a grouped 3x3 and a 1x1 convolution with a shortcut; ReLU after the sum."""

    def __init__(
        self, in_channels: int, inner_channels: int, out_channels: int, cardinality: int, *, stride: int
    ) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(in_channels, inner_channels, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(inner_channels)
        self.conv_conv = nn.Conv2d(
            inner_channels, inner_channels, 3, stride=stride, padding=1, groups=cardinality, bias=False
        )
        self.bn = nn.BatchNorm2d(inner_channels)
        self.conv_expand = nn.Conv2d(inner_channels, out_channels, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Sequential | None = None
        if in_channels != out_channels:
            shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        out = F.relu(self.bn_reduce(self.conv_reduce(x)))
        out = F.relu(self.bn(self.conv_conv(out)))
        out = self.bn_expand(self.conv_expand(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))
