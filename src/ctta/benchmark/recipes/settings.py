"""The published settings of methods that the CoTTA paper does not compare, by data set.

The sources are cited beside the values: "authors" is the public code of the method's authors, "MD" the benchmark
mariodoebler/test-time-adaptation, whose protocol is that of the recipes (one pass, no reset, 5,000 images per
corruption of ImageNet-C). Where the two differ, the recipes follow MD. What a data set does not list is the default of
the class, which is the authors' setting for CIFAR10-C unless its docstring says otherwise. The settings of the paper's
own rows are in :mod:`ctta.benchmark.recipes.images`.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from ctta.benchmark.recipes.base import MethodSpec
from ctta.core.model import AdaptiveModel
from ctta.core.registry import NamedMethod
from ctta.methods import METHODS
from ctta.methods.cotta import OFFICIAL_SEGMENTATION
from ctta.views import Views, augmix_views, multiscale_flip

DataSet = Literal["cifar10", "cifar100", "imagenet"]

ADAM = partial(torch.optim.Adam, lr=1e-3)
SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
#: The published protocols normalize every batch by its own statistics, also a short last one.
BATCH_ONLY: Mapping[str, Any] = {"batch_stats": 1.0}

#: MD's optimizer for ImageNet-C; the authors of EATA, DeYO and RDumb have the same without nesterov.
IMAGENET = {"optimizer": partial(SGD, lr=2.5e-4)}
#: That of methods with a projector or a teacher of all weights.
IMAGENET_FAST = {"optimizer": partial(SGD, lr=0.01)}
#: MD leaves out the top layers by names that the networks for CIFAR do not have, so it trains all norm layers of them.
ALL_NORMS = {"skip_top": False}

#: Hyperparameters by method and data set, where they are not the defaults of the class. Those without an entry have one
#: setting everywhere: BN-alpha (MD's alpha of 0.1), BN-EMA, LAME, T3A (20 supports, as FOA compares it), RoTTA (MD has
#: its Adam also for ImageNet-C), NOTE, AdaContrast (MD: SGD with 2e-4 and a weight decay of 1e-4), VANE (chosen on
#: hold-out corruptions), REM (Adam with 1e-3) and FOA (for ImageNet-C). A new method needs none.
PUBLISHED: Mapping[str, Mapping[DataSet, Mapping[str, Any]]] = {
    # Entropy of selected samples. MD; the margin is 0.4 ln C, a fraction in all classes.
    "eta": {
        "cifar10": {"redundancy": 0.4},
        "cifar100": {"redundancy": 0.1},
        "imagenet": {"redundancy": 0.05, **IMAGENET},
    },
    "eata": {
        "cifar10": {"redundancy": 0.4, "fisher_weight": 1.0},
        "cifar100": {"redundancy": 0.1, "fisher_weight": 1.0},
        "imagenet": {"redundancy": 0.05, "fisher_weight": 2000.0, **IMAGENET},
    },
    # MD has 0.4 for CIFAR100-C here, unlike for ETA. A reset every 1000 batches everywhere.
    "rdumb": {
        "cifar10": {"redundancy": 0.4},
        "cifar100": {"redundancy": 0.4},
        "imagenet": {"redundancy": 0.05, **IMAGENET},
    },
    # Authors, for ResNet-50 in batches of 64, without nesterov; MD's SGD for CIFAR is the default.
    "sar": {
        "cifar10": ALL_NORMS,
        "cifar100": ALL_NORMS,
        "imagenet": {"optimizer": partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)},
    },
    # MD, with a drop of 0.2 everywhere; the authors have 0.3 for i.i.d. streams of ImageNet-C.
    "deyo": {"cifar10": ALL_NORMS, "cifar100": ALL_NORMS, "imagenet": IMAGENET},
    # CCC, the benchmark of RDumb's authors.
    "rpl": {"imagenet": {"optimizer": partial(torch.optim.SGD, lr=5e-4, momentum=0.9)}},
    # The paper names no optimizer for these networks; that of TENT.
    "slr": {"imagenet": IMAGENET},
    # CIFAR: the online version in TEA's code, which trains norm layers. No such code for ImageNet: the class's default.
    "shot_im": {
        "cifar10": {"trains": "norms", "optimizer": ADAM},
        "cifar100": {"trains": "norms", "optimizer": ADAM},
    },
    # An addition to TENT, with its optimizer on CIFAR; the authors' for ImageNet is the default.
    "delta": {"cifar10": {"optimizer": ADAM}, "cifar100": {"optimizer": ADAM}},
    # MD is the home of ROID and SANTA, and of RMT; CMF's authors extend it.
    "roid": {"imagenet": IMAGENET},
    "cmf": {"imagenet": IMAGENET},
    "santa": {"imagenet": IMAGENET_FAST},
    "rmt": {"imagenet": IMAGENET_FAST},
    # Memories of 64 images. Authors.
    "petta": {"imagenet": {"loss": "cross_entropy"}},
    "sotta": {
        "cifar10": {"min_confidence": 0.99},
        "cifar100": {"min_confidence": 0.66},
        "imagenet": {"min_confidence": 0.33},
    },
    "tribe": {
        "cifar10": {"momentum": 0.01, "spread": 0.0, "max_entropy": 0.05},
        "cifar100": {"momentum": 0.05, "spread": 0.1, "max_entropy": 0.2},
        "imagenet": {
            "momentum": 0.5,
            "spread": 0.5,
            "max_entropy": 0.4,
            "optimizer": partial(torch.optim.Adam, lr=5e-4),
        },
    },
    # Authors, after CoTTA; its settings for ImageNet-C, without the prior, which needs snapshots of a training.
    "petal": {
        "cifar10": {"threshold": 0.92},
        "cifar100": {"threshold": 0.72},
        "imagenet": {"threshold": 0.1, **IMAGENET_FAST},
    },
    # Authors.
    "palm": {
        "cifar10": {"temperature": 50.0, "max_gradient": 1.0, "momentum": 0.5},
        "cifar100": {
            "temperature": 100.0,
            "max_gradient": 0.5,
            "momentum": 0.1,
            "optimizer": partial(torch.optim.Adam, lr=5e-4, weight_decay=5e-4),
        },
        "imagenet": {
            "temperature": 1000.0,
            "max_gradient": 0.3,
            "momentum": 0.5,
            "optimizer": partial(torch.optim.Adam, lr=5e-5),
        },
    },
    # Authors, for CIFAR. They have none for ImageNet, where their buffer of 10,000 images would take 6 GB.
    "tea": {"imagenet": {"buffer_size": 1000}},
    # Authors: no momentum; 32 views for CIFAR, 64 for ImageNet.
    "memo": {"imagenet": {"views": augmix_views(64, crop="resize"), "optimizer": partial(torch.optim.SGD, lr=2.5e-4)}},
}


def add_published(
    rows: Mapping[str, MethodSpec], data_set: DataSet | None, *, batch_size: int, views: Views
) -> dict[str, MethodSpec]:
    """Return the rows of a recipe together with every other method of the library, at its published settings.

    Args:
        rows: The rows that the recipe defines by itself.
        data_set: The column of :data:`PUBLISHED`; None for the defaults of the classes.
        batch_size: Images per batch of the stream, which ROID and CMF divide by.
        views: The views of CoTTA in this recipe, which PETAL has as well.

    Returns:
        The methods by name, the given rows first.
    """
    found = dict(rows)
    for name, method in METHODS.items():
        if name in found:
            continue
        parameters = inspect.signature(method).parameters
        settings = {
            **(BATCH_ONLY if _uses_batch_statistics(method) else {}),
            **({"batch_size": batch_size} if "batch_size" in parameters else {}),
            **({"views": views} if name == "petal" else {}),
            **(PUBLISHED.get(name, {}).get(data_set, {}) if data_set else {}),
        }
        found[name] = MethodSpec(NamedMethod(name, method).label, method, settings)
    return found


def add_pixel_methods(rows: Mapping[str, MethodSpec]) -> dict[str, MethodSpec]:
    """Return the rows of a segmentation recipe together with every other method that labels pixels.

    Nobody has published settings of these methods for street scenes. They get what CoTTA's reference implementation has
    in common for its rows: the optimizer, the source's statistics, and views that keep pixels in their place.

    Args:
        rows: The rows that the recipe defines by itself.

    Returns:
        The methods by name, the given rows first.
    """
    found = dict(rows)
    for name, method in METHODS.items():
        if name in found or not (method.info is None or method.info.labels_pixels):
            continue
        parameters = inspect.signature(method).parameters
        settings: dict[str, Any] = {"batch_stats": 0.0} if _uses_batch_statistics(method) else {}
        if "optimizer" in parameters:
            settings["optimizer"] = OFFICIAL_SEGMENTATION["optimizer"]
        if "views" in parameters:
            averages = name in ("petal", "test_aug")
            settings["views"] = OFFICIAL_SEGMENTATION["views"] if averages else multiscale_flip((1.0,))
        if name == "petal":
            settings["threshold"] = OFFICIAL_SEGMENTATION["threshold"]
        found[name] = MethodSpec(NamedMethod(name, method).label, method, settings)
    return found


def _uses_batch_statistics(method: type[AdaptiveModel]) -> bool:
    """Return whether a method normalizes by the statistics of the batch, from a number of images on."""
    parameter = inspect.signature(method).parameters.get("batch_stats")
    return parameter is not None and parameter.default == "auto"
