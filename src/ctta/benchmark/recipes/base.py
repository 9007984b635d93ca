"""The parts of a recipe: the methods that it compares, with their published settings, and the task that has them.

Sources are cited beside published settings: "authors" is the public code of the method's authors, "MD" the benchmark
mariodoebler/test-time-adaptation, whose protocol is that of the recipes (one pass, no reset, 5,000 images per
corruption of ImageNet-C). Where the two differ, the recipes follow MD. What a data set does not list is the default of
the class, which is the authors' setting for CIFAR10-C unless its docstring says otherwise. The settings of the CoTTA
paper's own rows are in :mod:`ctta.benchmark.recipes.images`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from ctta.core.model import AdaptiveModel
from ctta.core.registry import NamedMethod, list_methods, name_of, parse_settings, resolve_method, unknown_method
from ctta.data.streams import Stream
from ctta.errors import ConfigError, did_you_mean
from ctta.methods import METHODS
from ctta.methods.cotta import OFFICIAL_SEGMENTATION
from ctta.policies import parse_policy
from ctta.source_stats import SourceStats
from ctta.views import DrawnViews, Views, augmix_views, multiscale_flip


@dataclass(frozen=True)
class MethodSpec:
    """A method with the hyperparameters of a recipe: one row of its table.

    Attributes:
        label: Name of the row in tables.
        factory: Method class, or one of its named variants such as ``CoTTA.paper``.
        settings: Keyword arguments of the factory.
        reset_at_domain: Whether the model is reset where a new segment begins.
    """

    label: str
    factory: Callable[..., AdaptiveModel]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reset_at_domain: bool = False

    @property
    def method_class(self) -> type[AdaptiveModel]:
        """The class of the method, also where the factory is a named variant of it."""
        cls = getattr(self.factory, "__self__", self.factory)
        assert isinstance(cls, type) and issubclass(cls, AdaptiveModel)
        return cls

    @property
    def is_random(self) -> bool:
        """Whether the method draws random numbers, such as views or restored weights: results depend on the seed."""
        parameters = inspect.signature(self.method_class).parameters
        settings = {name: parameter.default for name, parameter in parameters.items()} | dict(self.settings)
        if "seed" not in parameters:
            return False
        if not {"views", "restore"} & parameters.keys() or any(each.is_random for each in settings.get("policies", ())):
            return True
        starts_random = self.method_class.info is not None and self.method_class.info.starts_random
        views = settings.get("views")
        draws_views = isinstance(views, DrawnViews) and getattr(views, "is_random", True)
        return starts_random or draws_views or settings.get("restore", 0) > 0

    @property
    def lacks_seed(self) -> bool:
        """Whether a user's method draws random numbers by ``self.generator``, and its constructor takes no seed."""
        return "seed" not in inspect.signature(self.method_class).parameters and any(
            "generator" in _list_names(getattr(function, "__code__", None))
            for cls in self.method_class.__mro__
            if not cls.__module__.startswith(("ctta.", "torch."))
            for function in vars(cls).values()
        )

    @property
    def needs_source_stats(self) -> bool:
        """Whether the method takes statistics of source images, given or not."""
        info = self.method_class.info
        takes_them = "source_stats" in inspect.signature(self.method_class).parameters
        return takes_them and info is not None and info.needs_source_data

    @property
    def lacks_source_stats(self) -> bool:
        """Whether the method needs statistics of source images and has none."""
        return self.needs_source_stats and self.settings.get("source_stats") is None

    def build_model(self, net: nn.Module, seed: int) -> AdaptiveModel:
        """Wrap a network in the method.

        Args:
            net: Source network.
            seed: Seed of the method; ignored by methods without randomness.

        Returns:
            A new adaptive model.
        """
        return self.factory(net, **self.settings, **({"seed": seed} if self.is_random else {}))


def _list_names(code: CodeType | None) -> set[str]:
    """Return the attributes and globals that a function uses, and those of the functions inside of it."""
    if code is None:
        return set()
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_list_names, inner))


@dataclass(frozen=True)
class BenchmarkTask:
    """A table to fill: a network, a stream and the methods to compare.

    Attributes:
        make_network: Builds the source network, in eval mode.
        make_stream: Builds the stream for the number of an order, None for the standard order.
        methods: Methods by the names that ``methods=`` and ``--methods`` take.
        default_methods: Names of the methods that run unless the user chooses.
        default_orders: Orders that run unless the user chooses.
        default_seeds: Seeds that run unless the user chooses, for methods that draw random numbers.
        rounds: How many times the stream is repeated unless the user chooses.
        downloads: Names in :mod:`ctta.data.datasets` that the task reads unless the user provides data and model.
        accepts: The options that only some recipes take and this one does, such as ``"corruptions"``.
        check_network: Raises if a network does not fit the images; called before any cell runs.
        load_stats: Returns the statistics of source images that ship with the network, for the method of a name.
    """

    make_network: Callable[[], nn.Module]
    make_stream: Callable[[int | None], Stream]
    methods: Mapping[str, MethodSpec]
    default_methods: tuple[str, ...]
    default_orders: tuple[int | None, ...] = (None,)
    default_seeds: tuple[int, ...] = (0,)
    rounds: int = 1
    downloads: tuple[str, ...] = ()
    accepts: frozenset[str] = frozenset()
    check_network: Callable[[nn.Module], None] | None = None
    load_stats: Callable[[str], SourceStats] | None = None


def add_methods(methods: Mapping[str, MethodSpec], names: Iterable[str]) -> dict[str, MethodSpec]:
    """Return the methods of a recipe, and after them others of :mod:`ctta.core.registry`.

    A preset of a method that the recipe has keeps the recipe's settings, except those of the preset.
    """
    found = dict(methods)
    for name in names:
        if name in found:
            continue
        if name not in list_methods() and not name.startswith("file:"):
            raise unknown_method(name, list(dict.fromkeys([*methods, *list_methods()])))
        named = resolve_method(name)
        row = methods.get(name_of(named.method))
        inherited = row.settings if row is not None and row.method_class is named.method else {}
        found[name] = MethodSpec(named.label, named.method, {**inherited, **named.settings})
    return found


def add_source_stats(
    methods: Mapping[str, MethodSpec], load_stats: Callable[[str], SourceStats]
) -> dict[str, MethodSpec]:
    """Return the methods with statistics of source images where they need them."""
    changed = dict(methods)
    for name, spec in methods.items():
        if spec.lacks_source_stats:
            changed[name] = replace(spec, settings={**spec.settings, "source_stats": load_stats(name)})
    return changed


def apply_changes(
    methods: Mapping[str, MethodSpec],
    settings: tuple[str, ...],
    policies: tuple[str, ...] = (),
    *,
    ignore_others: bool = False,
) -> dict[str, MethodSpec]:
    """Return the methods with some hyperparameters replaced, and with policies added.

    Args:
        methods: Methods of a recipe by name; one of a file is also known by the name of its class.
        settings: Texts such as ``cotta.restore=0.005``; values are parsed as in :mod:`ctta.core.hyperparameters`.
        policies: Texts such as ``reset_every=1000``, for every method that learns, or ``tent.reset_every=1000``, for
            one; see :func:`ctta.policies.parse_policy`.
        ignore_others: Whether to ignore settings and policies of other methods, which :func:`plan` has checked.
    """
    changed = dict(methods)
    names = {name.rpartition(":")[2] if name.startswith("file:") else name: name for name in methods}

    def is_other(text: str, typed: str) -> bool:
        """Return whether a text is for a method that is to be ignored; raise for one that nobody knows."""
        if typed not in names and not ignore_others:
            raise ConfigError(
                f"{text!r} names a method that this recipe does not have{did_you_mean(typed, names)}; it has "
                f"{', '.join(names)}"
            )
        return typed not in names

    def set_value(name: str, text: str) -> None:
        spec = changed[name]
        parsed = parse_settings(spec.method_class, [text], spec.settings)
        changed[name] = replace(spec, settings={**spec.settings, **parsed})

    for setting in settings:
        target, equals, text = setting.partition("=")
        typed, dot, key = target.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"expected a setting METHOD.NAME=VALUE, such as cotta.restore=0.005; got {setting!r}")
        if is_other(setting, typed):
            continue
        if key == "seed":
            raise ConfigError(f"{setting!r} sets a seed: choose seeds with the option 'seeds' instead")
        set_value(names[typed], f"{key}={text}")
    for text in policies:
        typed, dot, _ = text.partition("=")[0].partition(",")[0].partition(".")
        if dot and is_other(text, typed):
            continue
        policy = text.removeprefix(f"{typed}.") if dot else text
        parse_policy(policy)  # also where no method learns
        for name, spec in methods.items():
            learns = "policies" in inspect.signature(spec.method_class).parameters
            if name == names[typed] if dot else learns:
                set_value(name, f"policies={policy}")
    return changed


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
#: hold-out corruptions), REM (Adam with 1e-3), FOA and ZeroSiam (for ImageNet-C). A new method needs none.
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

    Without a data set these are the defaults of the classes. ROID and CMF divide by the batch size, and PETAL has the
    views of CoTTA.
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
