"""Image classification: the tasks of the CoTTA paper, those that ship with the library, and your own images.

The paper's tasks have the settings of its reference implementation. Those on the embedded network need no download and
take minutes; with ``--data`` they take the 10,000 test images of CIFAR-10 in a folder instead of the 2,000 that ship.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from ctta import models
from ctta.benchmark.options import BenchmarkOptions, Preset
from ctta.benchmark.recipes.base import ADAM, BATCH_ONLY, SGD, BenchmarkTask, DataSet, MethodSpec, add_published
from ctta.core.registry import DEFAULT_METHOD
from ctta.data import datasets
from ctta.data.datasets import (
    ArrayDataset,
    CifarC,
    CorruptionDataset,
    DomainFolders,
    FolderDataset,
    ImageNetC,
    read_clean_images,
    sample,
)
from ctta.data.datasets.base import CLEAN
from ctta.data.datasets.clean import CleanDataset
from ctta.data.datasets.image_files import list_folders
from ctta.data.streams import CorruptionSequence, Stream, gradual, parse_protocol
from ctta.data.streams.sequences import corruption_order
from ctta.errors import ConfigError, DataError
from ctta.methods import BNStats, CoTTA, PseudoLabel, Source, Tent, TestAug
from ctta.models import CIFAR10_CLASSES
from ctta.models.cifar import embedded_stats
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats
from ctta.views import fast_image_views, image_views

#: The rows of the paper's tables, and those of its ablation of CoTTA.
METHODS = ("source", "bn_stats", "pseudo_label", "tent_online", "tent", "test_aug", "cotta")
ABLATION = ("cotta_weight_average", "cotta_view_average", "cotta")
TEN_ORDERS = tuple(range(10))
FIVE_SEEDS = (1, 2, 3, 4, 5)

#: The reference implementation's setting for CIFAR10-C.
CIFAR10 = {"threshold": 0.92}
PRESETS = {"official": CoTTA.official, "paper": CoTTA.paper}
#: The gradual stream of each preset: the reference implementation starts its first corruption at full severity.
GRADUAL: dict[Preset, Literal["authors", "paper"]] = {"official": "authors", "paper": "paper"}

#: The options of :func:`corrupted_stream` that recipes without corruptions do not take.
CORRUPTION_OPTIONS = frozenset({"corruptions", "severity", "protocol"})

IMAGENET_NETWORK = "timm:resnet50.tv_in1k"
IMAGENET_GROUPS = ("noise", "blur", "weather", "digital")
#: RobustBench's list of 5,000 images; used if it is in the data folder, else the first five images of each class.
IMAGENET_LIST = "imagenet_test_image_ids.txt"


def every_method(
    options: BenchmarkOptions,
    data_set: DataSet | None,
    *,
    batch_size: int = 200,
    tent: OptimizerFactory = ADAM,
    cotta: Mapping[str, Any],
    official: Mapping[str, Any] | None = None,
) -> dict[str, MethodSpec]:
    """Return the methods of the paper's tables, in their order, and all others, with the settings for a data set.

    Args:
        options: The user's options, of which the preset and the batch size matter.
        data_set: Whose published settings to take; None for the defaults of the classes.
        batch_size: Images per batch unless the user chooses.
        tent: Optimizer of TENT and Pseudo-label.
        cotta: Hyperparameters of CoTTA besides its views.
        official: Those that only its reference implementation has.

    Returns:
        The methods by name.
    """
    teacher, views = PRESETS[options.preset], image_views(32)
    both = {"views": views, **BATCH_ONLY, **cotta}
    by_preset: dict[Preset, dict[str, Any]] = {"official": {**both, **(official or {})}, "paper": both}
    settings = by_preset[options.preset]
    norm_settings = {"optimizer": tent, **BATCH_ONLY}
    rows = {
        "source": MethodSpec("Source", Source),
        "bn_stats": MethodSpec("BN Stats Adapt", BNStats, BATCH_ONLY),
        "pseudo_label": MethodSpec("Pseudo-label", PseudoLabel, norm_settings),
        "tent_online": MethodSpec("TENT-online*", Tent, norm_settings, reset_at_domain=True),
        "tent": MethodSpec("TENT-continual", Tent, norm_settings),
        "test_aug": MethodSpec("Test Aug", TestAug, {"views": views, **BATCH_ONLY}),
        "cotta_weight_average": MethodSpec("CoTTA: weight-avg", teacher, {**settings, "views": (), "restore": 0.0}),
        "cotta_view_average": MethodSpec("CoTTA: + aug-avg", teacher, {**settings, "restore": 0.0}),
        "cotta": MethodSpec("CoTTA", teacher, settings),
        "cotta_fast": MethodSpec("CoTTA fast", teacher, {**settings, "views": fast_image_views()}),
        "cotta_official": MethodSpec("CoTTA official", CoTTA.official, by_preset["official"]),
        "cotta_paper": MethodSpec("CoTTA paper", CoTTA.paper, by_preset["paper"]),
    }
    return add_published(rows, data_set, batch_size=options.batch_size or batch_size, views=views)


def cifar10c(options: BenchmarkOptions) -> BenchmarkTask:
    """CIFAR10-C: WideResNet-28-10, 15 corruptions at severity 5 in a row, 10,000 images each."""
    return _make_cifar_task(options, "cifar10", "wrn28-10", "wrn28-10-standard", cotta=CIFAR10)


def cifar10c_gradual(options: BenchmarkOptions) -> BenchmarkTask:
    """Gradual CIFAR10-C: severity rises and falls, mean over ten orders (official: 131 segments)."""
    return _make_gradual(cifar10c(options), options, lambda: _open_cifar(options, "cifar10"), TEN_ORDERS)


def cifar100c(options: BenchmarkOptions) -> BenchmarkTask:
    """CIFAR100-C: ResNeXt-29 trained with AugMix, 15 corruptions at severity 5 in a row, 10,000 images each."""
    return _make_cifar_task(options, "cifar100", "resnext29", "resnext29-augmix", cotta={"threshold": 0.72})


def imagenetc(options: BenchmarkOptions) -> BenchmarkTask:
    """ImageNet-C: ResNet-50, 15 corruptions at severity 5 in a row, 5,000 images each, mean over ten orders."""
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or IMAGENET_NETWORK),
        downloads=_downloads(options, tuple(f"imagenet-c/{group}" for group in IMAGENET_GROUPS)),
        make_stream=lambda order: corrupted_stream(_imagenet(options), options, order, batch_size=64),
        accepts=CORRUPTION_OPTIONS,
        methods=imagenet_methods(options),
        default_methods=METHODS,
        default_orders=TEN_ORDERS,
    )


def imagenet_methods(options: BenchmarkOptions) -> dict[str, MethodSpec]:
    """Return every method with its settings for ImageNet-C, in batches of 64."""
    official = {"restore": 0.001, "loss": "symmetric"}
    cotta = {"threshold": 0.1, "optimizer": partial(SGD, lr=0.01)}
    tent = partial(SGD, lr=2.5e-4)
    return every_method(options, "imagenet", batch_size=64, tent=tent, cotta=cotta, official=official)


def corrupted_stream(
    data: CorruptionDataset | Stream,
    options: BenchmarkOptions,
    order: int | None,
    batch_size: int = 200,
    limit: int | None = None,
) -> Stream:
    """Return a stream of corruptions, as the user's options choose them and the protocol.

    Without corruptions of the user's, ``order`` is a random order by number, or the standard one. Batch size and limit
    of segments are defaults.
    """
    names = None if options.corruptions is None else tuple(options.corruptions)
    if names is not None and order is not None:  # those of the published order first, in its order, and then others
        published = corruption_order(order)
        names = tuple(sorted(names, key=lambda name: published.index(name) if name in published else len(published)))
    sequence = CorruptionSequence(
        order=None if names is not None else order,
        names=names,
        severity=options.severity,
        **stream_sizes(options, batch_size, limit),
        num_rounds=options.rounds,
    )
    return parse_protocol(options.protocol or "continual").build(data, sequence)


def stream_sizes(options: BenchmarkOptions, batch_size: int = 200, limit: int | None = None) -> dict[str, Any]:
    """Return ``batch_size`` and ``limit`` of a stream: the user's, or these defaults."""
    return {"batch_size": options.batch_size or batch_size, "limit": options.limit or limit}


def _make_gradual(
    task: BenchmarkTask,
    options: BenchmarkOptions,
    open_images: Callable[[], CorruptionDataset],
    orders: tuple[int | None, ...],
) -> BenchmarkTask:
    """Return a task with the gradual stream of its images in place of corruptions that the user chooses."""
    return replace(
        task,
        make_stream=lambda order: gradual(
            open_images(), variant=GRADUAL[options.preset], order=order, **stream_sizes(options)
        ),
        accepts=frozenset(),
        default_orders=orders,
        default_seeds=(0,),
    )


def _make_cifar_task(
    options: BenchmarkOptions,
    data_set: Literal["cifar10", "cifar100"],
    architecture: str,
    weights: str,
    cotta: Mapping[str, Any],
) -> BenchmarkTask:
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or f"{architecture}:{datasets.find(weights)}"),
        downloads=_downloads(options, (f"{data_set}-c",), weights),
        make_stream=lambda order: corrupted_stream(_open_cifar(options, data_set), options, order),
        accepts=CORRUPTION_OPTIONS,
        methods=every_method(options, data_set, cotta=cotta),
        default_methods=METHODS,
        default_seeds=FIVE_SEEDS,
    )


def _open_cifar(options: BenchmarkOptions, data_set: str) -> CifarC:
    return CifarC(options.data or datasets.find(f"{data_set}-c"))


def _imagenet(options: BenchmarkOptions) -> ImageNetC:
    cached = [] if options.data else [datasets.find(f"imagenet-c/{group}") for group in IMAGENET_GROUPS]
    folder = Path(options.data) if options.data else cached[0].parent
    image_list = folder / IMAGENET_LIST
    double = options.preset == "official"
    if image_list.is_file():
        return ImageNetC(folder, images=image_list, double_resize=double)
    return ImageNetC(folder, num_per_class=5, double_resize=double)


def _downloads(options: BenchmarkOptions, images: tuple[str, ...], network: str | None = None) -> tuple[str, ...]:
    weights = () if options.model or network is None else (network,)
    return (() if options.data else images) + weights


#: The rows of the demo; the last is what a user gets who names no method.
DEMO_METHODS = tuple(dict.fromkeys(("source", "bn_stats", "tent", "cotta_fast", "cotta", DEFAULT_METHOD)))


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


def demo(options: BenchmarkOptions) -> BenchmarkTask:
    """Demo of a few minutes: ResNet-20, 15 corruptions at severity 5 in a row, 200 images each."""
    return replace(
        embedded(options),
        make_stream=lambda order: corrupted_stream(_open_images(options), options, order, batch_size=50, limit=200),
        methods=every_method(options, "cifar10", batch_size=50, cotta=CIFAR10),
        default_methods=DEMO_METHODS,
        default_seeds=(1,),
    )


def embedded_gradual(options: BenchmarkOptions) -> BenchmarkTask:
    """Gradual stream of the images of embedded: severity rises and falls, three orders (official: 131 segments)."""
    return _make_gradual(embedded(options), options, lambda: _open_images(options), (0, 1, 2))


def ablation(options: BenchmarkOptions) -> BenchmarkTask:
    """Ablation of CoTTA on the stream of embedded, five seeds."""
    return replace(embedded(options), default_methods=ABLATION, default_seeds=FIVE_SEEDS)


def load_embedded_stats(method: str) -> SourceStats:
    """Return the statistics of the embedded network's training images; PeTTA's are of the network as trained."""
    return embedded_stats(frozen=method == "petta")


def _open_images(options: BenchmarkOptions) -> ArrayDataset:
    """Return the images that ship with the library, or all test images of CIFAR-10 in the user's folder."""
    return sample() if options.data is None else _read_cifar(options.data, 10, CIFAR10_CLASSES)


def _read_cifar(data: str | PathLike[str], num_classes: int, class_names: tuple[str, ...] = ()) -> ArrayDataset:
    """Return the test images of CIFAR-10 or CIFAR-100 in the user's folder: an archive, or a tree <class>/<image>."""
    folder = Path(data) / "test"  # of a tree <split>/<class>/<image>
    found = read_clean_images(folder if folder.is_dir() else data)
    largest = -1 if found.labels is None else int(found.labels.max())
    # Too few for CIFAR-100 are those of CIFAR-10, and a missing folder would shift the labels after it.
    if not num_classes // 10 <= largest < num_classes or found.num_folders not in (None, num_classes):
        labels = "no labels" if largest < 0 else f"labels up to {largest}"
        raise DataError(f"{data} has {labels}: expected CIFAR-{num_classes}, with labels up to {num_classes - 1}")
    assert found.labels is not None
    return ArrayDataset(found.images, found.labels, name=f"cifar{num_classes}-test", class_names=class_names)


#: The rows of recipes for the user's own network.
OWN_METHODS = ("source", "bn_stats", "tent", "cotta_fast", DEFAULT_METHOD)


def folder(options: BenchmarkOptions) -> BenchmarkTask:
    """Your own images: a tree <class>/<image> (--data) with your network (--model), under corruptions."""
    root, model = require_files("folder", options, "--data val/ --model file:net.py:build")

    @cache  # listing a large tree takes a while
    def open_folder() -> FolderDataset:
        return FolderDataset(root, size=options.size, classes=options.classes)

    return BenchmarkTask(
        make_network=lambda: models.load(model),
        make_stream=lambda order: corrupted_stream(open_folder(), options, order, batch_size=64),
        methods=every_method(options, None, batch_size=64, cotta={}),
        default_methods=OWN_METHODS,
        default_seeds=(1,),
        accepts=CORRUPTION_OPTIONS | {"size", "classes"},
        check_network=lambda net: check_classes(net, open_folder()),
    )


def imagenet_val(options: BenchmarkOptions) -> BenchmarkTask:
    """ImageNet validation images (--data), corrupted when read: ResNet-50 or --model, 15 x 5,000 images."""
    root, model = require_files("imagenet-val", options, "--data VAL", IMAGENET_NETWORK)

    @cache
    def open_folder() -> FolderDataset:
        crop, classes = options.size is None, options.classes or _find_imagenet_classes(root)
        return FolderDataset(root, size=options.size, crop=crop, classes=classes)

    return replace(
        folder(replace(options, model=model)),
        make_stream=lambda order: corrupted_stream(open_folder(), options, order, batch_size=64, limit=5_000),
        methods=imagenet_methods(options),
        check_network=lambda net: check_classes(net, open_folder()),
    )


def _find_imagenet_classes(root: str | PathLike[str]) -> tuple[str, ...] | None:
    """Return the folders in the order of ImageNet's classes if they are named by index, else None: that of WordNet."""
    names = {int(name): name for name in list_folders(Path(root)) if name.isdecimal()}
    return tuple(names.get(index, str(index)) for index in range(1000)) if names else None


def cifar100(options: BenchmarkOptions) -> BenchmarkTask:
    """CIFAR-100 test images, corrupted when read: ResNeXt-29 trained with AugMix or --model, 15 x 10,000 images."""

    @cache
    def open_images() -> ArrayDataset:
        return _read_cifar(options.data or datasets.find("cifar100"), 100)

    return replace(
        cifar100c(options),
        make_stream=lambda order: corrupted_stream(open_images(), options, order),
        downloads=_downloads(options, ("cifar100",), "resnext29-augmix"),
        default_methods=OWN_METHODS,
        default_seeds=(1,),
        check_network=lambda net: check_classes(net, open_images(), 100),
    )


def pacs(options: BenchmarkOptions) -> BenchmarkTask:
    """PACS (--data) with your network (--model) trained on photos: art, cartoon and sketch, all images of each."""
    root, _ = require_files("pacs", options, "--data PACS --model file:net.py:build")

    @cache
    def open_domains() -> DomainFolders:
        return DomainFolders(root, source="photo", size=options.size or (224, 224), classes=options.classes)

    def make_stream(order: int | None) -> Stream:
        if order is not None:
            raise ConfigError("pacs has one order only (art, cartoon, sketch): leave out the option 'orders'")
        return corrupted_stream(open_domains(), options, order, batch_size=64)

    return replace(
        folder(options),
        make_stream=make_stream,
        accepts=frozenset({"corruptions", "protocol", "size", "classes"}),
        check_network=lambda net: check_classes(net, open_domains().open("photo")),
    )


def require_files(
    recipe: str, options: BenchmarkOptions, example: str, network: str | None = None
) -> tuple[str | PathLike[str], str]:
    """Return the user's data and network, or this default network; raise a ConfigError if one is missing."""
    model = options.model or network
    if options.data is None or model is None:
        missing = "--data DIR" if options.data is None else "--model SPEC"
        raise ConfigError(
            f"the recipe {recipe!r} needs files of yours; {missing} is missing: ctta bench {recipe} {example}"
        )
    return options.data, model


def check_classes(net: nn.Module, data: CleanDataset, num_classes: int | None = None) -> None:
    """Raise a ConfigError unless a network classifies images into as many classes as these have.

    The number is that of the folders of a tree unless it is given.
    """
    images, _ = data.domain(CLEAN, 1).read(np.arange(1))
    device = next((parameter.device for parameter in net.parameters()), images.device)
    logits = Source(net)(images.to(device))
    if logits.ndim != 2:
        raise ConfigError(f"expected a network that classifies images, got outputs of shape {tuple(logits.shape)}")
    if logits.shape[1] != (expected := num_classes or len(data.class_names)):
        advice = (
            "give --classes FILE with a class name per line, in the order of the network's outputs; the folders have "
            "these names"
        )
        raise ConfigError(
            f"the network has {logits.shape[1]} classes and the images have {expected}: "
            f"{'give a network for these classes' if num_classes else advice}"
        )
