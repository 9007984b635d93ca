"""A small network with GroupNorm that is trained in the test, and the images that come with the library."""

from functools import cache
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@cache
def read_sample() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the clean images that come with the library, with their labels."""
    with np.load(files("ctta.data.datasets") / "sample.npz") as arrays:  # type: ignore[arg-type]
        return arrays["images"], arrays["labels"].astype(np.int64)


@cache
def train_group_norm() -> nn.Module:
    """Train a network on the first 1,500 of these images, normalized by the mean and std of CIFAR-10."""
    images, labels = read_sample()
    x = torch.from_numpy(images[:1500]).permute(0, 3, 1, 2) / 255
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    y = torch.from_numpy(labels[:1500])
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 24, 3, 2, 1),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, 2, 1),
        nn.GroupNorm(4, 48),
    ]
    net = nn.Sequential(*layers, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48 * 4, 10))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(8):
        for rows in torch.randperm(len(x)).split(50):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()
