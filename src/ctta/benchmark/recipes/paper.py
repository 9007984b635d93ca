"""The paper's five tasks, with its authors' settings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ctta import datasets, models
from ctta.benchmark.recipes.rows import METHODS, paper_rows
from ctta.benchmark.recipes.task import Options, Preset, Task
from ctta.datasets import CifarC, ImageNetC
from ctta.streams import continual, gradual

TEN_ORDERS = tuple(range(10))
FIVE_SEEDS = (1, 2, 3, 4, 5)
IMAGENET_GROUPS = ("noise", "blur", "weather", "digital")
#: RobustBench's list of 5,000 pictures, taken if it lies in the data folder; else the first five of each class.
IMAGENET_LIST = "imagenet_test_image_ids.txt"
#: Which gradual stream goes with a preset: the authors' code starts its first corruption at its worst.
GRADUAL: dict[Preset, Literal["authors", "paper"]] = {"official": "authors", "paper": "paper"}
SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True)


def cifar10c(options: Options) -> Task:
    """CIFAR10-C: WideResNet-28-10, 15 corruptions at severity 5 in a row, 10,000 images each."""
    return Task(
        network=_cifar_network(options, "wrn28-10", "wrn28-10-standard"),
        downloads=_downloads(options, ("cifar10-c",), "wrn28-10-standard"),
        stream=lambda order: continual(_cifar(options, "cifar10-c"), order=order, **sizes(options)),
        rows=paper_rows(options.preset, cotta={"threshold": 0.92}),
        methods=METHODS,
        seeds=FIVE_SEEDS,
    )


def cifar10c_gradual(options: Options) -> Task:
    """Gradual CIFAR10-C: each corruption comes and goes, mean over ten orders (official: the authors' 131 segments)."""
    return Task(
        network=_cifar_network(options, "wrn28-10", "wrn28-10-standard"),
        downloads=_downloads(options, ("cifar10-c",), "wrn28-10-standard"),
        stream=lambda order: gradual(
            _cifar(options, "cifar10-c"), variant=GRADUAL[options.preset], order=order, **sizes(options)
        ),
        rows=paper_rows(options.preset, cotta={"threshold": 0.92}),
        methods=METHODS,
        orders=TEN_ORDERS,
    )


def cifar100c(options: Options) -> Task:
    """CIFAR100-C: ResNeXt-29 trained with AugMix, 15 corruptions at severity 5 in a row, 10,000 images each."""
    return Task(
        network=_cifar_network(options, "resnext29", "resnext29-augmix"),
        downloads=_downloads(options, ("cifar100-c",), "resnext29-augmix"),
        stream=lambda order: continual(_cifar(options, "cifar100-c"), order=order, **sizes(options)),
        rows=paper_rows(options.preset, cotta={"threshold": 0.72}),
        methods=METHODS,
        seeds=FIVE_SEEDS,
    )


def imagenetc(options: Options) -> Task:
    """ImageNet-C: ResNet-50, 15 corruptions at severity 5 in a row, 5,000 images each, mean over ten orders."""
    official = {"restore": 0.001, "loss": "symmetric"}
    cotta = {"threshold": 0.1, "optimizer": partial(SGD, lr=0.01), **(official if options.preset == "official" else {})}
    return Task(
        network=lambda: models.load(options.model or "timm:resnet50.tv_in1k"),
        downloads=_downloads(options, tuple(f"imagenet-c/{group}" for group in IMAGENET_GROUPS)),
        stream=lambda order: continual(_imagenet(options), order=order, **sizes(options, 64)),
        rows=paper_rows(options.preset, tent=partial(SGD, lr=2.5e-4), cotta=cotta),
        methods=METHODS,
        orders=TEN_ORDERS,
    )


def sizes(options: Options, batch_size: int = 200, limit: int | None = None) -> dict[str, Any]:
    """How many images a stream has per batch and per segment."""
    return {"batch_size": options.batch_size or batch_size, "limit": options.limit or limit}


def _cifar(options: Options, name: str) -> CifarC:
    return CifarC(options.data or datasets.find(name))


def _cifar_network(options: Options, architecture: str, weights: str) -> Callable[[], nn.Module]:
    return lambda: models.load(options.model or f"{architecture}:{datasets.find(weights)}")


def _imagenet(options: Options) -> ImageNetC:
    cached = [] if options.data else [datasets.find(f"imagenet-c/{group}") for group in IMAGENET_GROUPS]
    folder = Path(options.data) if options.data else cached[0].parent
    chosen = folder / IMAGENET_LIST
    double = options.preset == "official"
    if chosen.is_file():
        return ImageNetC(folder, images=chosen, double_resize=double)
    return ImageNetC(folder, per_class=5, double_resize=double)


def _downloads(options: Options, images: tuple[str, ...], network: str | None = None) -> tuple[str, ...]:
    weights = () if options.model or network is None else (network,)
    return (() if options.data else images) + weights
