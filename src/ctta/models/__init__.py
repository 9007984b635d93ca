"""The networks of the field's benchmarks, their files of weights, and networks of other libraries by name."""

from ctta.models.by_name import LOADERS, load
from ctta.models.checkpoints import load_weights_
from ctta.models.embedded import embedded
from ctta.models.normalized import Normalized
from ctta.models.resnet20 import ResNet20
from ctta.models.resnext import ResNeXt29
from ctta.models.segformer import segformer
from ctta.models.sliding_window import SlidingWindow
from ctta.models.street_segformer import streets, tiny_segformer
from ctta.models.wide_resnet import WideResNet

__all__ = [
    "LOADERS",
    "Normalized",
    "ResNeXt29",
    "ResNet20",
    "SlidingWindow",
    "WideResNet",
    "embedded",
    "load",
    "load_weights_",
    "segformer",
    "streets",
    "tiny_segformer",
]
