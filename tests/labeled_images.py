"""A few random images with labels, in the forms in which users have them, and a small network for them."""

import numpy as np
import torch
from torch import Tensor, nn

BYTES = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
X = torch.from_numpy(BYTES).permute(0, 3, 1, 2).div(255)
Y = torch.arange(40) % 5


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 49, 5)
    return nn.Sequential(*layers).eval()


def in_batches(size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), Y.split(size), strict=True))
