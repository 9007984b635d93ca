"""ResNet-20 for 32x32 images (He et al. 2016, section 4.2), and the trained one that ships with the library."""

from importlib.resources import as_file, files

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

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
