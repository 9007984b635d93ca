"""WideResNet, the network of the CIFAR10-C benchmark, with the keys of RobustBench's files, and a small trained one."""

from importlib.resources import as_file, files
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.errors import ConfigError
from ctta.models.weights import load_weights_


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


def embedded_wide() -> WideResNet:
    """Return a WRN-28-2 trained on CIFAR-10, in eval mode: the depth of the paper's network, a fifth of its width.

    It takes images in [0, 1]; ``PROVENANCE.md`` documents its training.

    Returns:
        The network, in channels-last memory format.
    """
    net = WideResNet(depth=28, width=2)
    with as_file(files("ctta.models") / "wide.safetensors") as path:
        load_weights_(net, path)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
    return net.eval()
