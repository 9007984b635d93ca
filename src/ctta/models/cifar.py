"""Networks for 32x32 images: ResNet-20, of which a trained one ships with the library, WideResNet and ResNeXt-29."""

from importlib.resources import as_file, files
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.errors import ConfigError
from ctta.source_stats import SourceStats

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization and a parameter-free shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_new_channels = out_channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the input, subsampled and zero-padded in channels where the shape changes."""
        if self.stride == 1 and self.num_new_channels == 0:
            return x
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.num_new_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet20(nn.Module):
    """ResNet-20 for 32x32 images in [0, 1], which it normalizes with the mean and std of CIFAR-10.

    Three stages of three blocks with 16, 32 and 64 channels. Larger images work too: the last average is over the
    whole feature map.

    Args:
        num_classes: Number of logits.

    Reference: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(CIFAR10_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(CIFAR10_STD).view(1, 3, 1, 1))
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stage1 = self._make_stage(16, 16, stride=1)
        self.stage2 = self._make_stage(16, 32, stride=2)
        self.stage3 = self._make_stage(32, 64, stride=2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _make_stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
        first = ResNetBlock(in_channels, out_channels, stride)
        return nn.Sequential(first, *(ResNetBlock(out_channels, out_channels, 1) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, 3, H, W) in [0, 1]."""
        x = F.relu(self.bn(self.conv((x - self.mean) / self.std)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def embedded() -> ResNet20:
    """Return the ResNet-20 trained on CIFAR-10 that ships with the library, in eval mode.

    It takes images in [0, 1]; ``PROVENANCE.md`` documents its training.

    >>> embedded()(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    net = ResNet20()
    with as_file(files("ctta.models") / "embedded.safetensors") as path:
        net.load_state_dict(load_file(path))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # about 1.5 times as fast on a CPU
    return net.eval()


def embedded_stats(*, frozen: bool = False) -> SourceStats:
    """Return statistics of the images that :func:`embedded` was trained on, for methods that need them.

    They are of 10,000 training images of CIFAR-10 with their labels, in batches of 200; ``PROVENANCE.md`` documents how
    they were computed.

    Args:
        frozen: Whether the network normalized by its own statistics, as PeTTA expects, and not by those of each batch.

    Returns:
        The statistics.

    >>> embedded_stats()
    SourceStats(10000 images, given labels: class_counts, class_means, ..., layer_outputs.variance)
    """
    name = "embedded_stats_frozen.safetensors" if frozen else "embedded_stats.safetensors"
    with as_file(files("ctta.models") / name) as path:
        return SourceStats.load(path)


class WideResNet(nn.Module):
    """WideResNet for 32x32 images in [0, 1], which it does not normalize.

    Pre-activation blocks: BatchNorm and ReLU come before each convolution. The default is WRN-28-10, 36,479,194
    parameters. Larger images work too: the last average is over the whole feature map, 8x8 for 32x32 images.

    Args:
        depth: Number of layers, 6 n + 4 for n blocks in each of the three groups.
        width: Factor on the usual 16, 32 and 64 channels.
        num_classes: Number of logits.

    Reference: Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016.

    >>> import torch
    >>> net = WideResNet(depth=10, width=1).eval()
    >>> net(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int = 28, width: int = 10, num_classes: int = 10) -> None:
        super().__init__()
        num_blocks, rest = divmod(depth - 4, 6)
        if rest or num_blocks < 1:
            raise ConfigError(f"depth must be 6 n + 4, such as 10, 16, 28 or 40, got {depth}")
        if width < 1 or num_classes < 1:
            raise ConfigError(f"width and num_classes must be at least 1, got {width} and {num_classes}")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = WideResNetGroup(num_blocks, 16, 16 * width, stride=1)
        self.block2 = WideResNetGroup(num_blocks, 16 * width, 32 * width, stride=2)
        self.block3 = WideResNetGroup(num_blocks, 32 * width, 64 * width, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, 3, H, W) in [0, 1]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        x = F.relu(self.bn1(x)).mean((2, 3))
        return cast(Tensor, self.fc(x))


class WideResNetGroup(nn.Module):
    """Blocks of one width, the first of which changes width and resolution; its attribute is named as in the files."""

    def __init__(self, num_blocks: int, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        first = WideResNetBlock(in_channels, out_channels, stride=stride)
        self.layer = nn.Sequential(
            first, *(WideResNetBlock(out_channels, out_channels, stride=1) for _ in range(num_blocks - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        return cast(Tensor, self.layer(x))


class WideResNetBlock(nn.Module):
    """Two pre-activated 3x3 convolutions with a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        # Named as in RobustBench's files.
        self.convShortcut = (
            nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False) if in_channels != out_channels else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        activated = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        # Where widths differ, the shortcut starts from the activated input too; elsewhere it is the input itself.
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        return cast(Tensor, shortcut + out)


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
