"""A benchmark of the user's own: any labeled tree of images, under any corruptions, with any network."""

import numpy as np
from torch import nn

from ctta import models
from ctta.benchmark.recipes.base import BenchmarkOptions, BenchmarkTask
from ctta.benchmark.recipes.paper import CORRUPTION_OPTIONS, corrupted_stream, every_method
from ctta.data.datasets.corruptible import CLEAN, CorruptedFolder
from ctta.errors import ConfigError
from ctta.methods import Source

METHODS = ("source", "bn_stats", "tent", "cotta_fast")
EXAMPLE = "ctta bench folder --data val/ --model file:net.py:build"


def folder(options: BenchmarkOptions) -> BenchmarkTask:
    """Your own images: a tree <class>/<image> (--data) with your network (--model), under corruptions."""
    if options.data is None or options.model is None:
        missing = "--data DIR" if options.data is None else "--model SPEC"
        raise ConfigError(f"the recipe 'folder' needs your images and your network; {missing} is missing: {EXAMPLE}")
    model, root = options.model, options.data
    opened: list[CorruptedFolder] = []  # listing a large tree takes a while

    def open_folder() -> CorruptedFolder:
        if not opened:
            opened.append(CorruptedFolder(root, size=options.size, classes=options.classes))
        return opened[0]

    return BenchmarkTask(
        make_network=lambda: models.load(model),
        make_stream=lambda order: corrupted_stream(open_folder(), options, order, batch_size=64),
        methods=every_method(options, None, batch_size=64, cotta={}),
        default_methods=METHODS,
        default_seeds=(1,),
        accepts=CORRUPTION_OPTIONS | {"size", "classes"},
        check_network=lambda net: check_classes(net, open_folder()),
    )


def check_classes(net: nn.Module, data: CorruptedFolder) -> None:
    """Raise unless a network classifies images into as many classes as a tree has.

    Args:
        net: The network.
        data: The tree.

    Raises:
        ConfigError: It does not; the message says what to do.
    """
    images, _ = data.domain(CLEAN, 1).read(np.arange(1))
    device = next((parameter.device for parameter in net.parameters()), images.device)
    logits = Source(net)(images.to(device))
    if logits.ndim != 2:
        raise ConfigError(f"expected a network that classifies images, got outputs of shape {tuple(logits.shape)}")
    if logits.shape[1] != len(data.class_names):
        raise ConfigError(
            f"the network has {logits.shape[1]} classes and the images have {len(data.class_names)}: give --classes "
            "FILE with a class name per line, in the order of the network's outputs; the folders have these names"
        )
