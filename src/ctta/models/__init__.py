"""Networks of the published benchmarks, their weights files, and pretrained networks of other libraries by name."""

from ctta.models.cifar import ResNet20, ResNeXt29, WideResNet, embedded, embedded_stats
from ctta.models.pretrained import Normalized, normalize_input
from ctta.models.registry import CIFAR10_CLASSES, CIFAR10_NETWORKS, LOADERS, class_names, list_models, load, to_device
from ctta.models.segmentation import SlidingWindow, segformer, streets, tiny_segformer
from ctta.models.weights import load_weights_
from ctta.models.zero_shot import ZeroShot, class_vectors, zero_shot

__all__ = [
    "CIFAR10_CLASSES",
    "CIFAR10_NETWORKS",
    "LOADERS",
    "Normalized",
    "ResNeXt29",
    "ResNet20",
    "SlidingWindow",
    "WideResNet",
    "ZeroShot",
    "class_names",
    "class_vectors",
    "embedded",
    "embedded_stats",
    "list_models",
    "load",
    "load_weights_",
    "normalize_input",
    "segformer",
    "streets",
    "tiny_segformer",
    "to_device",
    "zero_shot",
]
