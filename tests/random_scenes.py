"""A segmentation network and streams of random scenes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ctta
from ctta.data.datasets import IGNORE_INDEX
from ctta.data.streams import Segment, Stream

SIZE, FULL = (6, 10), (12, 20)  # of images and of label maps


@dataclass(frozen=True)
class RandomScenes:
    """Random scenes; the label maps are twice as large as the images."""

    name: str
    num_classes: int = 4
    ignored: tuple[int, ...] = ()  # scenes without a labeled pixel

    labels = None

    def __len__(self) -> int:
        return 5

    def read(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        images, maps = [], []
        for row in rows.tolist():
            generator = torch.Generator().manual_seed(len(self.name) * 100 + row)
            images.append(torch.rand(3, *SIZE, generator=generator))
            labels = torch.randint(self.num_classes, FULL, generator=generator)
            labels[torch.rand(FULL, generator=generator) < 0.2] = IGNORE_INDEX
            maps.append(torch.full_like(labels, IGNORE_INDEX) if row in self.ignored else labels)
        return torch.stack(images), torch.stack(maps)


class NamedScenes(RandomScenes):
    """Scenes of a dataset with named classes."""

    class_names = ("road", "sky", "car", "tree")


def make_net(num_classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1)).eval()


def make_cotta() -> ctta.CoTTA:
    views = ctta.views.multiscale_flip((1.0, 2.0))
    return ctta.CoTTA(make_net(), views=views, gate="element", average="probabilities", loss="hard", seed=3)


def make_stream(*scenes: RandomScenes, batch_size: int = 2) -> Stream:
    domains = scenes or (RandomScenes("fog"), RandomScenes("night"))
    segments = [Segment(dataset.name, dataset, np.arange(len(dataset))) for dataset in domains]
    return Stream("scenes", segments, batch_size=batch_size)
