"""The networks of the field's benchmarks, and their files of weights."""

from ctta.models.checkpoints import load_weights_
from ctta.models.normalized import Normalized
from ctta.models.resnext import ResNeXt29
from ctta.models.wide_resnet import WideResNet

__all__ = ["Normalized", "ResNeXt29", "WideResNet", "load_weights_"]
