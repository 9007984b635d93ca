"""ResNet-50 (He et al. 2016, stride in the 3x3 convolution), to time steps on a network for ImageNet."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResNet50Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if in_channels != 4 * width:
            self.shortcut.append(nn.Conv2d(in_channels, 4 * width, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


def resnet50() -> nn.Module:
    """Return a ResNet-50 (25.6 million parameters), initialized randomly from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks = []
        channels = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(ResNet50Bottleneck(channels, width, stride if number == 0 else 1))
                channels = 4 * width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
        return nn.Sequential(*stem, *blocks, *head).eval()
