"""Networks that only benchmarks need, with their weights: they are part of the repository and not of the package.

    ctta bench embedded --model file:benchmarks/networks/load.py:wide
    ctta bench streets --model file:benchmarks/networks/load.py:streets_bn

``src/ctta/models/PROVENANCE.md`` documents their training.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.data.streets import CLASSES
from ctta.models import WideResNet, load_weights_
from ctta.models.cifar import ResNetBlock

FOLDER = Path(__file__).parent


class StreetCNN(nn.Module):
    """A residual encoder down to a sixteenth of the image, dilated context and a decoder with two skip connections.

    It takes images in [0, 1] of any size, has 0.7 million parameters and BatchNorm after every convolution but the
    last, and returns logits at a quarter of the image's resolution; methods resize them.

    Args:
        num_classes: Number of logits per pixel.

    >>> StreetCNN(9).eval()(torch.rand(1, 3, 64, 120)).shape
    torch.Size([1, 9, 16, 30])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = _make_convolution(3, 24, stride=2)
        self.stage1 = ResNetBlock(24, 32, stride=2)
        self.stage2 = nn.Sequential(ResNetBlock(32, 64, stride=2), ResNetBlock(64, 64, stride=1))
        self.stage3 = nn.Sequential(ResNetBlock(64, 96, stride=2), ResNetBlock(96, 96, stride=1))
        self.context = nn.ModuleList(_make_convolution(96, 48, dilation=dilation) for dilation in (2, 4))
        self.decoder2 = _make_convolution(96 + 64, 64)
        self.decoder1 = _make_convolution(64 + 32, 48)
        self.classifier = nn.Conv2d(48, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes, H / 4, W / 4) of images (N, 3, H, W) in [0, 1]."""
        stage1 = self.stage1(self.stem(x - 0.5))
        stage2 = self.stage2(stage1)
        stage3 = self.stage3(stage2)
        context = torch.cat([layer(stage3) for layer in self.context], 1)
        decoded = self.decoder2(torch.cat([_enlarge(context, stage2), stage2], 1))
        logits: Tensor = self.classifier(self.decoder1(torch.cat([_enlarge(decoded, stage1), stage1], 1)))
        return logits


def _make_convolution(in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


def _enlarge(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


def wide() -> WideResNet:
    """Return a WRN-28-2 trained on CIFAR-10, in eval mode: the depth of the paper's network, a fifth of its width."""
    net = WideResNet(depth=28, width=2)
    load_weights_(net, FOLDER / "wide.safetensors")
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
    return net.eval()


def streets_bn() -> StreetCNN:
    """Return the convolutional network trained on drawn street scenes in clear weather, in eval mode."""
    net = StreetCNN(len(CLASSES))
    load_weights_(net, FOLDER / "streets_bn.safetensors")
    return net.eval()
