"""Options that several commands share, and how their values are parsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from ctta import models
from ctta.core.config import read_config
from ctta.data.corruptions.registry import check_severity
from ctta.data.streams.orders import RANDOM_ORDERS
from ctta.errors import ConfigError, DataError
from ctta.guard import GainEstimator
from ctta.models import to_device

ClassesOption = Annotated[
    Path | None,
    typer.Option(
        help="Read the class names from this text file, one per line, in the order of the network's outputs.",
        metavar="FILE",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="Run the network on this torch device, such as cuda:0.", metavar="DEVICE")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Accept a file of which no SHA-256 is known, so that it cannot be verified completely."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
METHOD_HELP = (
    "Use this method or preset, such as tent or cotta_fast (see: ctta methods), or a class of your own: "
    "file:PATH.py:Class."
)
MethodOption = Annotated[str, typer.Option(help=METHOD_HELP, metavar="NAME")]
OptionalMethodOption = Annotated[
    str | None, typer.Option(help=f"{METHOD_HELP} Default: that of the saved state, else vane.", metavar="NAME")
]
ModelOption = Annotated[
    str,
    typer.Option(
        help="Load this network: embedded, timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.",
        metavar="SPEC",
    ),
]
OptionalModelOption = Annotated[
    str | None,
    typer.Option(
        help="Load this network: embedded, timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function. "
        "Default: that of --config.",
        metavar="SPEC",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Read network, method, settings and batch size from this file, as 'ctta advise' writes it; other options "
        "replace what it says. Default: none.",
        metavar="FILE.toml",
    ),
]
CleanImagesOption = Annotated[
    Path,
    typer.Option(
        help="Read clean images from a folder, with or without one subfolder per class, or from an .npz file.",
        metavar="DIR|FILE.npz",
    ),
]
LabelsOption = Annotated[
    bool | None,
    typer.Option(
        "--labels/--no-labels",
        help="Score against the labels of the images. Default: if there are as many subfolders as classes.",
    ),
]
ArraySizeOption = Annotated[
    tuple[int, int] | None,
    typer.Option(
        help="Resize image files; the arrays of an .npz file keep their size. Default: their own size.",
        metavar="HEIGHT WIDTH",
        callback=lambda size: check_size(size),
    ),
]
MeanOption = Annotated[
    str | None,
    typer.Option(
        help="Normalize images by this mean per channel, such as 0.485,0.456,0.406, for a network that expects it. "
        "Default: the network gets images in [0, 1].",
        metavar="R,G,B",
    ),
]
StdOption = Annotated[
    str | None,
    typer.Option(help="Divide by this standard deviation per channel; give it with --mean.", metavar="R,G,B"),
]
SeedOption = Annotated[int | None, typer.Option(help="Seed the random draws of the method. Default: 0.", metavar="N")]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Apply this policy around the updates of the method, such as reset_every=1000, restore=0.01 or "
        "reset_every=64000,unit=images (see: ctta methods); repeatable. Default: none.",
        metavar="NAME[=VALUE]",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a hyperparameter of the method, such as restore=0.005, lr=1e-4 or views=8; repeatable.",
        metavar="NAME=VALUE",
    ),
]


def check_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Reject sizes that are not positive; typer has ranges for single numbers only."""
    if size is not None and min(size) < 1:
        raise typer.BadParameter(f"height and width must be at least 1, got {size[0]} {size[1]}")
    return size


SizeOption = Annotated[
    tuple[int, int] | None,
    typer.Option(
        help="Resize the images. Default: keep their size.",
        metavar="HEIGHT WIDTH",
        callback=check_size,
    ),
]


def load_network(spec: str, device: str, mean: str | None = None, std: str | None = None) -> nn.Module:
    """Load a network by its name, with the values of ``--mean`` and ``--std``, and move it to a device."""
    channels = parse_channels("mean", mean), parse_channels("std", std)
    net = models.normalize_input(models.load(spec), spec, *channels)
    return to_device(net, device)


@dataclass(frozen=True)
class ChosenAdaptation:
    """Network, method and settings of a command, from its options and the file of ``--config``.

    Attributes:
        model: Name of the network.
        net: The network, on its device.
        method: Name of the method; None if nobody names one.
        texts: Settings and policies, each ``NAME=VALUE``.
        size: Size to resize images to.
        batch_size: Images per step; None if nobody says.
        estimator: What estimates the accuracy of the method without labels; None if the configuration has none.
    """

    model: str
    net: nn.Module
    method: str | None
    texts: list[str]
    size: tuple[int, int] | None
    batch_size: int | None
    estimator: GainEstimator | None = None


def choose_adaptation(
    config: Path | None,
    *,
    model: str | None,
    method: str | None,
    texts: Sequence[str],
    mean: str | None,
    std: str | None,
    size: tuple[int, int] | None,
    device: str,
    batch_size: int | None = None,
) -> ChosenAdaptation:
    """Load the network and decide on a method: by the options where they are given, else by the configuration.

    The settings of a configuration belong to its method, so ``--method`` with another name drops them.
    """
    if config is None:
        if model is None:
            raise ConfigError("give --model SPEC, or --config FILE with a network in it")
        return ChosenAdaptation(model, load_network(model, device, mean, std), method, list(texts), size, batch_size)
    found = read_config(config)
    if model is None and found.model is None:
        raise ConfigError(f"{config} names no network: give --model SPEC, or add model to its table [network]")
    if model is None and mean is None and std is None:
        assert found.model is not None
        model, net = found.model, found.load_network(device)
    else:
        model = model or found.model
        assert model is not None
        net = load_network(model, device, mean, std)
    is_same = method is None or method == found.method
    return ChosenAdaptation(
        model,
        net,
        method or found.method,
        [*(found.texts if is_same else []), *texts],
        size or found.size,
        batch_size or found.batch_size,
        found.estimator if is_same and not texts else None,  # it holds for these settings only
    )


def parse_channels(what: str, text: str | None) -> tuple[float, ...] | None:
    """Parse one number per channel, or one for all of them.

    >>> parse_channels("mean", "0.5, 0.4, 0.3")
    (0.5, 0.4, 0.3)
    """
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in parse_names(text))
    except ValueError:
        values = ()
    if len(values) not in (1, 3):
        raise ConfigError(f"expected --{what} as three numbers such as 0.5,0.5,0.5, or one for all; got {text!r}")
    return values


def read_class_names(path: Path | None) -> list[str] | None:
    """Read one class name per line."""
    if path is None:
        return None
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: expected a file with one class name per line") from error
    if not names:
        raise DataError(f"{path} is empty: expected a file with one class name per line")
    return names


def join_settings(settings: Sequence[str] | None, policies: Sequence[str] | None, seed: int | None) -> list[str]:
    """Return the values of ``--set`` with those of ``--policy`` and ``--seed`` among them."""
    added = [f"policies={text}" for text in policies or ()]
    return [*(settings or ()), *added, *([] if seed is None else [f"seed={seed}"])]


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list.

    >>> parse_names("tent, cotta")
    ['tent', 'cotta']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_every(text: str) -> dict[str, Any]:
    """Parse which frames of a video to take: every n-th, or one per interval.

    >>> parse_every("10"), parse_every("0.5s")
    ({'every': 10}, {'interval': 0.5})
    """
    try:
        return {"interval": float(text.removesuffix("s"))} if text.endswith("s") else {"every": int(text)}
    except ValueError:
        raise ConfigError(f"expected every n-th frame such as 10, or seconds such as 0.5s, got {text!r}") from None


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as ``1,2,3``, or ``1-5`` for a range.

    >>> parse_seeds("1-3,7")
    [1, 2, 3, 7]
    """
    return [number for part in parse_names(text) for number in _parse_range("seeds", part)]


def parse_orders(text: str) -> list[int | None]:
    """Parse orders of corruptions: ``standard``, ``all`` (the ten random ones), or numbers as for seeds.

    >>> parse_orders("standard,0-2")
    [None, 0, 1, 2]
    """
    orders: list[int | None] = []
    for part in parse_names(text):
        if part == "standard":
            orders.append(None)
        elif part == "all":
            orders.extend(range(len(RANDOM_ORDERS)))
        else:
            orders.extend(_parse_range("orders", part))
    return orders


def parse_protocols(text: str) -> list[str]:
    """Parse a comma-separated list of protocols, which may have settings after commas themselves.

    >>> parse_protocols("continual,rotta,concentration=0.01,mixed")
    ['continual', 'rotta,concentration=0.01', 'mixed']
    """
    protocols: list[str] = []
    for part in parse_names(text):
        if "=" in part and protocols:
            protocols[-1] += f",{part}"
        else:
            protocols.append(part)
    return protocols


def parse_severities(text: str) -> list[float]:
    """Parse severities such as ``3,5`` or ``2.25``.

    >>> parse_severities("5,2.25")
    [2.25, 5]
    """
    try:
        levels = [check_severity(float(part)) for part in parse_names(text)]
    except (ValueError, ConfigError):
        levels = []
    if not levels or not all(levels):
        raise ConfigError(f"expected severities above 0 and up to 5, such as 3,5 or 2.25; got {text!r}")
    return sorted(set(levels))


def parse_target(text: str) -> str | float:
    """Parse the difficulty of CCC: a name, or a mean accuracy.

    >>> parse_target("hard"), parse_target("0.4")
    ('hard', 0.4)
    """
    try:
        return float(text)
    except ValueError:
        return text


def _parse_range(what: str, part: str) -> range:
    first, _, last = part.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"expected {what} as integers such as 1,2,3 or 1-5, got {part!r}") from None
