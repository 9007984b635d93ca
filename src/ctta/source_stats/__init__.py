"""What some methods need to know of source images: computed once, saved, and given to any method.

>>> import torch
>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
>>> stats = source_stats(net, [torch.randn(16, 4) for _ in range(4)])
>>> stats
SourceStats(64 images, labels of the network: class_counts, class_means, ..., layer_outputs.variance)
>>> import ctta
>>> model = ctta.EATA(net, source_stats=stats)
"""

from ctta.source_stats.compute import source_stats
from ctta.source_stats.statistics import SourceStats

__all__ = ["SourceStats", "source_stats"]
