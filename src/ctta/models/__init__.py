"""Networks of the published benchmarks, their weights files, and pretrained networks of other libraries by name."""

from ctta.models.normalized import Normalized, normalize_input
from ctta.models.registry import CIFAR10_CLASSES, CIFAR10_NETWORKS, LOADERS, class_names, list_models, load, to_device
from ctta.models.resnet20 import ResNet20, embedded, embedded_stats
from ctta.models.resnext import ResNeXt29
from ctta.models.segformer import segformer, streets, tiny_segformer
from ctta.models.sliding_window import SlidingWindow
from ctta.models.street_cnn import StreetCNN, streets_bn
from ctta.models.weights import load_weights_
from ctta.models.wide_resnet import WideResNet, embedded_wide

__all__ = [
    "CIFAR10_CLASSES",
    "CIFAR10_NETWORKS",
    "LOADERS",
    "Normalized",
    "ResNeXt29",
    "ResNet20",
    "SlidingWindow",
    "StreetCNN",
    "WideResNet",
    "class_names",
    "embedded",
    "embedded_stats",
    "embedded_wide",
    "list_models",
    "load",
    "load_weights_",
    "normalize_input",
    "segformer",
    "streets",
    "streets_bn",
    "tiny_segformer",
    "to_device",
]
