"""CCC for the embedded network, or for the user's own network and images: measured first, then walked along."""

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from torch import nn

from ctta import models
from ctta.benchmark.options import BenchmarkOptions
from ctta.benchmark.recipes.base import BenchmarkTask
from ctta.benchmark.recipes.images import CIFAR10, check_classes, every_method, imagenet_methods, load_embedded_stats
from ctta.data.corruptions import VERSION
from ctta.data.datasets import FolderDataset, cache_dir, sample
from ctta.data.datasets.clean import CleanDataset
from ctta.data.streams import AccuracyMatrix, Stream, measure_accuracy
from ctta.data.streams import ccc as ccc_stream
from ctta.data.streams.ccc import SPEED, Difficulty
from ctta.errors import ConfigError
from ctta.models import normalize_input, to_device
from ctta.nn.surgery import fingerprint

METHODS = ("source", "bn_stats", "tent", "rdumb", "cotta_fast")
EXAMPLE = "ctta bench ccc --data val/ --model timm:resnet50.tv_in1k --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"
#: The order that is the standard one here, of the published 43, 44 and 45.
SEED = 43
#: The options that only this recipe takes, and those that it shares with others.
CCC_OPTIONS = frozenset({"corruptions", "target", "speed", "num_images"})
#: The last quarter of the images is for the accuracy matrix, the others for the stream.
CALIBRATION_FRACTION = 0.25


@dataclass(frozen=True)
class CCCSize:
    """How long a stream is, and on how many images each point of its accuracy matrix is measured."""

    num_images: int
    speed: int
    batch_size: int
    num_calibration_images: int


#: Minutes on one core: 400 batches, and a few pairs of corruptions to measure. The standard error of an accuracy is at
#: most 5 points, and that of a folder's 3.5; the points of a walk have it in common, as they share their images.
EMBEDDED = CCCSize(num_images=20_000, speed=200, batch_size=50, num_calibration_images=100)
FOLDER = CCCSize(num_images=100_000, speed=SPEED, batch_size=64, num_calibration_images=200)
#: RDumb's 1,000 batches would be more than the embedded stream has.
EMBEDDED_RESET_PERIOD = 100


def ccc(options: BenchmarkOptions) -> BenchmarkTask:
    """CCC: corruptions turn into each other at one mean accuracy; the embedded network, or --data and --model."""
    if (options.data is None) != (options.model is None):
        missing = "--model SPEC" if options.model is None else "--data DIR"
        raise ConfigError(
            f"the recipe 'ccc' needs your images and your network, or none; {missing} is missing: {EXAMPLE}"
        )
    if options.limit is not None:
        raise ConfigError("the recipe 'ccc' draws its images: give --images N and --speed N instead of 'limit'")
    size = EMBEDDED if options.data is None else FOLDER
    batch_size = options.batch_size or size.batch_size

    def load_network() -> nn.Module:
        return models.load(options.model or "embedded")

    @cache
    def open_images() -> tuple[CleanDataset, int]:
        """Return all images, and the number of the first ones, which the stream is drawn from."""
        if options.data is None:
            data: CleanDataset = sample()
        else:  # preprocessed as ImageNet's, unless there is a size
            data = FolderDataset(options.data, size=options.size, crop=options.size is None, classes=options.classes)
        return data, len(data) - max(1, int(CALIBRATION_FRACTION * len(data)))

    @cache
    def measure() -> AccuracyMatrix:
        """Return accuracies on the last images, which are kept in the cache folder."""
        data, num_streamed = open_images()
        net = normalize_input(load_network(), options.model or "ccc", options.mean, options.std)
        net = to_device(net, options.device)
        if isinstance(data, FolderDataset):
            check_classes(net, data)
        calibration, num_images = data.select(num_streamed, len(data)), size.num_calibration_images
        identity = f"{fingerprint(net)} {calibration.content} {num_images} {VERSION}"
        folder = cache_dir() / "ccc" / hashlib.sha256(identity.encode()).hexdigest()[:16]
        return measure_accuracy(
            net, calibration, num_images=num_images, batch_size=batch_size, folder=folder, progress=True
        )

    def make_stream(order: int | None) -> Stream:
        """Return the stream; its order is the seed of the corruptions' sequence and of the images."""
        data, num_streamed = open_images()
        return ccc_stream(
            data.select(0, num_streamed),
            measure(),
            target="easy" if options.target is None else cast("float | Difficulty", options.target),  # checked there
            noises=options.corruptions,
            speed=options.speed or size.speed,
            seed=SEED if order is None else order,
            num_images=options.num_images or size.num_images,
            batch_size=batch_size,
        )

    if options.data is None:
        methods = every_method(options, "cifar10", batch_size=size.batch_size, cotta=CIFAR10)
        rdumb = methods["rdumb"]
        methods["rdumb"] = replace(rdumb, settings={**rdumb.settings, "period": EMBEDDED_RESET_PERIOD})
    else:
        methods = imagenet_methods(options)
    return BenchmarkTask(
        make_network=load_network,
        load_stats=load_embedded_stats if options.model is None else None,
        make_stream=make_stream,
        methods=methods,
        default_methods=METHODS,
        default_orders=(SEED,),
        default_seeds=(1,),
        accepts=CCC_OPTIONS if options.data is None else CCC_OPTIONS | {"size", "classes"},
    )
