"""The wide residual network that CIFAR10-C is scored with, in the key layout of RobustBench's files."""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F


class WideResNet(nn.Module):
    """WideResNet for 32x32 images in [0, 1], which it does not normalise.

    Pre-activation blocks: BatchNorm and ReLU come before each convolution. The default is WRN-28-10, 36,479,194
    parameters. Larger images work too: the last average is over the whole map, which for 32x32 images is 8x8.

    Args:
        depth: number of layers, 6 n + 4 for n blocks in each of the three groups.
        width: factor on the usual 16, 32 and 64 channels.
        num_classes: number of logits.

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
            raise ValueError(f"the depth of a WideResNet is 6 n + 4, such as 10, 16, 28 or 40; got {depth}")
        if width < 1 or num_classes < 1:
            raise ValueError(f"width and num_classes must be at least 1, got {width} and {num_classes}")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Group(num_blocks, 16, 16 * width, stride=1)
        self.block2 = Group(num_blocks, 16 * width, 32 * width, stride=2)
        self.block3 = Group(num_blocks, 32 * width, 64 * width, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        x = F.relu(self.bn1(x)).mean((2, 3))
        return cast(Tensor, self.fc(x))


class Group(nn.Module):
    """The blocks of one width; the first changes width and resolution. A module because the files say `.layer.`"""

    def __init__(self, num_blocks: int, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        first = Block(num_in, num_out, stride=stride)
        self.layer = nn.Sequential(first, *(Block(num_out, num_out, stride=1) for _ in range(num_blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x))


class Block(nn.Module):
    """Two pre-activated 3x3 convolutions beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(num_in)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        # The name is the files'.
        self.convShortcut = nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False) if num_in != num_out else None

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        inside = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        # Where widths differ, the shortcut too starts from the activated input; elsewhere it is the bare input.
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        return cast(Tensor, shortcut + inside)
