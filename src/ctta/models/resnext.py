"""The ResNeXt that CIFAR100-C is scored with, in the key layout of AugMix's and RobustBench's files."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResNeXt29(nn.Module):
    """ResNeXt-29 for 32x32 images in [0, 1], which it normalises itself: (x - 0.5) / 0.5.

    Three stages of three blocks, each a grouped 3x3 convolution between two 1x1 ones. The default has 6,900,132
    parameters. Larger images work too: the last average is over the whole map, which for 32x32 images is 8x8.

    Args:
        num_classes: number of logits.
        cardinality: number of groups of the 3x3 convolutions.
        base_width: channels per group, in 64ths of the stage's 64, 128 or 256.

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
            raise ValueError(
                "num_classes, cardinality and base_width must be at least 1, "
                f"got {num_classes}, {cardinality} and {base_width}"
            )
        self.register_buffer("mu", torch.full((1, 3, 1, 1), 0.5))
        self.register_buffer("sigma", torch.full((1, 3, 1, 1), 0.5))
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)
        inner = [cardinality * (channels * base_width // 64) for channels in (64, 128, 256)]
        self.stage_1 = _stage(64, inner[0], 256, cardinality, stride=1)
        self.stage_2 = _stage(256, inner[1], 512, cardinality, stride=2)
        self.stage_3 = _stage(512, inner[2], 1024, cardinality, stride=2)
        self.classifier = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn_1(self.conv_1_3x3((x - self.mu) / self.sigma)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        return cast(Tensor, self.classifier(x.mean((2, 3))))


def _stage(num_in: int, num_inner: int, num_out: int, cardinality: int, *, stride: int) -> nn.Sequential:
    first = Bottleneck(num_in, num_inner, num_out, cardinality, stride=stride)
    return nn.Sequential(first, *(Bottleneck(num_out, num_inner, num_out, cardinality, stride=1) for _ in range(2)))


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolution beside a shortcut; ReLU after the sum."""

    def __init__(self, num_in: int, num_inner: int, num_out: int, cardinality: int, *, stride: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(num_in, num_inner, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(num_inner)
        self.conv_conv = nn.Conv2d(num_inner, num_inner, 3, stride=stride, padding=1, groups=cardinality, bias=False)
        self.bn = nn.BatchNorm2d(num_inner)
        self.conv_expand = nn.Conv2d(num_inner, num_out, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(num_out)
        self.downsample: nn.Sequential | None = None
        if num_in != num_out:
            shortcut = nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.bn_reduce(self.conv_reduce(x)))
        inside = F.relu(self.bn(self.conv_conv(inside)))
        inside = self.bn_expand(self.conv_expand(inside))
        return F.relu(inside + (x if self.downsample is None else self.downsample(x)))
