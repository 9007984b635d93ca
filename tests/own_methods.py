"""A method in a file of a user's, and a tree of labeled images with a network for it."""

from pathlib import Path

import numpy as np
from PIL import Image

METHOD = """
from functools import partial

import torch
import ctta
from ctta.functional import entropy
from helpers_of_mine import SCALE

class Mine(ctta.AdaptiveModel):
    # Entropy minimization over all weights.

    def __init__(self, net, *, optimizer=partial(torch.optim.SGD, lr=1e-3), lr=None, strength=1.0):
        super().__init__(net, lr=lr)
        self.strength = strength
        self.student = self.copy_of_source()
        self.optimize(self.student, optimizer)

    def adapt_step(self, x):
        logits = self.student(x)
        self.minimize(self.strength * SCALE * entropy(logits).mean())
        return logits
"""

NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))

def net():
    model = build()
    model(torch.rand(2, 3, 16, 16))
    return model.eval()

def four_classes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(4))
    model(torch.rand(2, 3, 16, 16))
    return model.eval()
"""
CLASSES = ("ant", "bee", "cat")


def write_method(folder: Path) -> str:
    """Write a method, with a module next to it that it imports, and return its name."""
    (folder / "helpers_of_mine.py").write_text("SCALE = 1.0\n")
    (folder / "mine.py").write_text(METHOD)
    return f"file:{folder / 'mine.py'}:Mine"


def write_labeled_tree(folder: Path, *, num_per_class: int = 6, side: int = 16) -> Path:
    """Write a tree of images whose brightness depends on the class."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(num_per_class):
            pixels = np.random.default_rng([label, number]).integers(0, 80, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels + 80 * np.uint8(label)).save(folder / name / f"{number}.png")
    return folder
