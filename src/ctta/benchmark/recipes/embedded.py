"""Tasks on the network and the images that ship with the library: nothing to download, minutes instead of hours.

With ``--data`` they take the 10,000 test images of CIFAR-10 in a folder instead of the 2,000 that ship.
"""

from ctta import models
from ctta.benchmark.recipes.base import BenchmarkOptions, BenchmarkTask
from ctta.benchmark.recipes.paper import (
    ABLATION,
    CORRUPTION_OPTIONS,
    GRADUAL,
    METHODS,
    corrupted_stream,
    every_method,
    stream_sizes,
)
from ctta.core.registry import DEFAULT_METHOD
from ctta.data.datasets import Corrupted, clean_cifar, sample
from ctta.data.streams import gradual
from ctta.errors import DataError
from ctta.models import CIFAR10_CLASSES
from ctta.models.cifar import embedded_stats
from ctta.source_stats import SourceStats

#: The reference implementation's setting for CIFAR10-C.
CIFAR10 = {"threshold": 0.92}
#: The rows of the demo; the last is what a user gets who names no method.
DEMO_METHODS = tuple(dict.fromkeys(("source", "bn_stats", "tent", "cotta_fast", "cotta", DEFAULT_METHOD)))


def demo(options: BenchmarkOptions) -> BenchmarkTask:
    """Demo of a few minutes: ResNet-20, 15 corruptions at severity 5 in a row, 200 images each."""
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or "embedded"),
        load_stats=None if options.model else load_embedded_stats,
        make_stream=lambda order: corrupted_stream(_open_images(options), options, order, batch_size=50, limit=200),
        accepts=CORRUPTION_OPTIONS,
        methods=every_method(options, "cifar10", batch_size=50, cotta=CIFAR10),
        default_methods=DEMO_METHODS,
        default_seeds=(1,),
    )


def embedded(options: BenchmarkOptions) -> BenchmarkTask:
    """Corrupted CIFAR-10 images: ResNet-20, 15 corruptions at severity 5, 2,000 images each (10,000 with --data)."""
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or "embedded"),
        load_stats=None if options.model else load_embedded_stats,
        make_stream=lambda order: corrupted_stream(_open_images(options), options, order),
        accepts=CORRUPTION_OPTIONS,
        methods=every_method(options, "cifar10", cotta=CIFAR10),
        default_methods=METHODS,
        default_seeds=(1, 2, 3),
    )


def embedded_gradual(options: BenchmarkOptions) -> BenchmarkTask:
    """Gradual stream of the images of embedded: severity rises and falls, three orders (official: 131 segments)."""
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or "embedded"),
        load_stats=None if options.model else load_embedded_stats,
        make_stream=lambda order: gradual(
            _open_images(options), variant=GRADUAL[options.preset], order=order, **stream_sizes(options)
        ),
        methods=every_method(options, "cifar10", cotta=CIFAR10),
        default_methods=METHODS,
        default_orders=(0, 1, 2),
    )


def ablation(options: BenchmarkOptions) -> BenchmarkTask:
    """Ablation of CoTTA on the stream of embedded, five seeds."""
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or "embedded"),
        load_stats=None if options.model else load_embedded_stats,
        make_stream=lambda order: corrupted_stream(_open_images(options), options, order),
        accepts=CORRUPTION_OPTIONS,
        methods=every_method(options, "cifar10", cotta=CIFAR10),
        default_methods=ABLATION,
        default_seeds=(1, 2, 3, 4, 5),
    )


def load_embedded_stats(method: str) -> SourceStats:
    """Return the statistics of the embedded network's training images that a method expects.

    Args:
        method: Name of the method.

    Returns:
        The statistics; PeTTA's are those of the network as it was trained, others those of adapted networks.
    """
    return embedded_stats(frozen=method == "petta")


def _open_images(options: BenchmarkOptions) -> Corrupted:
    """Return the images that ship with the library, or all test images of CIFAR-10 in the user's folder."""
    if options.data is None:
        return sample()
    images, labels = clean_cifar(options.data)
    if labels.max() >= len(CIFAR10_CLASSES):
        raise DataError(f"{options.data} has labels up to {labels.max()}: expected CIFAR-10, with labels up to 9")
    return Corrupted(images, labels, name="cifar10-test", class_names=CIFAR10_CLASSES)
