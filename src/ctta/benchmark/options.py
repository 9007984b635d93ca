"""What a user may change about a recipe, and which of its cells to run, described once.

The keywords of :func:`run` and :func:`run_matrix`, the options of ``ctta bench`` and the keys of ``run.json`` are made
of these fields.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self

from typing_extensions import Doc

from ctta.core.options import AMP, DEVICE, Classes, Mean, Option, Precision, Size, Std, parse_names
from ctta.data.streams.sequences import RANDOM_ORDERS
from ctta.errors import ConfigError
from ctta.policies import Policy

Preset = Literal["official", "paper"]
EXECUTION = "Execution"  # a section of ``ctta bench --help``


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


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What a user may change about a recipe; None keeps the recipe's own value.

    The fields are written to ``run.json``: a run folder is only continued with the same options.
    """

    data: Annotated[
        str | os.PathLike[str] | None,
        Option("Read the dataset from this folder. Default: the cache of 'ctta data get'.", "DIR"),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Load this network: timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function. Default: that of the "
            "recipe.",
            "SPEC",
        ),
        Doc("Source network as :func:`ctta.models.load` takes it; the recipe's own by default."),
    ] = None
    preset: Annotated[
        Preset, Option("Run CoTTA as in its reference implementation (official), or as in the text of the paper.")
    ] = "official"
    limit: Annotated[int | None, Option("Use only the first N images of each segment. Default: all.", "N", min=1)] = (
        None
    )
    batch_size: Annotated[
        int | None, Option("Adapt to N images at a time. Default: that of the recipe.", "N", min=1)
    ] = None
    rounds: Annotated[int | None, Option("Repeat the stream N times. Default: that of the recipe.", "N", min=1)] = None
    settings: Annotated[
        Sequence[str] | Mapping[str, object],
        Option(
            "Set a hyperparameter of a method, such as cotta.restore=0.005 or MyMethod.lr=1e-4; repeatable.",
            "METHOD.NAME=VALUE",
            "--set",
            repeatable=True,
        ),
        Doc('Hyperparameters of single methods: ``{"cotta.restore": 0.005}`` or ``["cotta.restore=0.005"]``.'),
    ] = ()
    device: Annotated[str, replace(DEVICE, panel=EXECUTION)] = "cpu"
    amp: Annotated[Precision | None, replace(AMP, panel=EXECUTION)] = None
    corruptions: Annotated[
        Sequence[str] | None,
        Option(
            "Use these corruptions, in this order, such as fog,snow; none stands for the images as they are, where "
            "they are corrupted when read. For pacs these are domains. Default: the 15 of the benchmarks.",
            "NAMES",
            parse=parse_names,
        ),
    ] = None
    severity: Annotated[
        float | None,
        Option(
            "Use this severity of the corruptions, 1 to 5; where images are corrupted as they are read, any number "
            "from 0 to 5, such as 2.25. Default: 5.",
            "N",
            min=0,
            max=5,
        ),
    ] = None
    size: Size = None
    classes: Classes = None
    mean: Mean = None
    std: Std = None
    source_stats: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Read statistics of source images from this file of 'ctta source-stats', for methods that need them. "
            "Default: those of the embedded network, none for others.",
            "FILE",
        ),
    ] = None
    policies: Annotated[
        Sequence[str | Policy] | None,
        Option(
            "Apply this policy to every method that learns, such as reset_every=1000, or to one, such as "
            "tent.reset_every=1000; repeatable. Default: none.",
            "[METHOD.]NAME[=VALUE]",
            "--policy",
            repeatable=True,
        ),
        Doc(
            "What happens around the updates of every method that learns: ``[ctta.policies.reset_every(1000)]`` or "
            '``["reset_every=1000"]``; of one method: ``["tent.reset_every=1000"]``.'
        ),
    ] = None
    protocol: Annotated[
        str | None,
        Option(
            "Let the corruptions arrive in this way, such as recurring or rotta,concentration=0.01; for a list see: "
            "ctta protocols. Default: that of the recipe.",
            "NAME[,KEY=VALUE]",
        ),
    ] = None
    target: Annotated[
        str | float | None,
        Option(
            "Let the walk of the recipe ccc have this difficulty: easy, medium or hard, relative to the network, or a "
            "mean accuracy such as 0.4. Default: easy.",
            "NAME|ACCURACY",
            parse=parse_target,
        ),
    ] = None
    speed: Annotated[
        int | None, Option("Use N images at each point of that walk. Default: 200, with --data 1000.", "N", min=1)
    ] = None
    num_images: Annotated[
        int | None,
        Option(
            "Let the stream of the recipe ccc have N images. Default: 20000, with --data 100000.",
            "N",
            "--images",
            min=1,
        ),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the options for ``run.json``; later additions only where they are set, so that old runs continue."""
        values = {name: list(value) if type(value) is tuple else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if value is not None or name in _ALWAYS_WRITTEN}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the options that :meth:`to_dict` has described.

        Args:
            values: The description.

        Returns:
            Equal options.
        """
        fields = ((name, tuple(each) if isinstance(each, list) else each) for name, each in values.items())
        return cls(**dict[str, Any](fields))

    @property
    def changes(self) -> list[str]:
        """The options that make results differ from the recipe's own, as typed on the command line."""
        typed = [
            ("--protocol", self.protocol),
            ("--target", None if self.target is None else str(self.target)),
            ("--speed", self.speed),
            ("--images", self.num_images),
            ("--model", self.model),
            ("--preset", self.preset if self.preset != "official" else None),
            ("--corruptions", self.corruptions and ",".join(self.corruptions)),
            ("--severity", self.severity),
            ("--size", self.size and " ".join(map(str, self.size))),
            ("--mean", self.mean and ",".join(f"{value:g}" for value in self.mean)),
            ("--std", self.std and ",".join(f"{value:g}" for value in self.std)),
            ("--source-stats", self.source_stats),
            ("--amp", self.amp),
        ]
        changes = [f"{name} {value}" for name, value in typed if value]
        policies = [f"--policy {text}" for text in self.policies or ()]
        return changes + policies + [f"--set {text}" for text in self.settings]


#: Options that ``run.json`` has also where they are not set, as in earlier versions.
_ALWAYS_WRITTEN = ("data", "model", "limit", "batch_size", "rounds")


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Which cells of a recipe to run."""

    methods: Annotated[
        Sequence[str] | None,
        Option(
            "Run these methods, such as source,tent,cotta_fast or file:PATH.py:Class (see: ctta methods); all runs "
            "every method that fits the network. Default: those of the recipe.",
            "NAMES",
            parse=parse_names,
        ),
    ] = None
    seeds: Annotated[
        Sequence[int] | None,
        Option(
            "Repeat stochastic methods with these seeds, such as 1,2,3 or 1-5. Default: those of the recipe.",
            "LIST",
            parse=parse_seeds,
        ),
    ] = None
    orders: Annotated[
        Sequence[int | None] | None,
        Option(
            "Run these orders of the corruptions: standard, all, or numbers such as 0-3. Default: those of the recipe.",
            "LIST",
            parse=parse_orders,
        ),
        Doc("Orders of domains by number, None for the standard order; the recipe's own choice by default."),
    ] = None
    protocols: Annotated[
        Sequence[str] | None,
        Option(
            "Run the matrix on these protocols, such as continual,recurring,num_visits=5. Default: all.",
            "LIST",
            parse=parse_protocols,
        ),
        Doc("Protocols of a matrix, as :func:`ctta.data.streams.parse_protocol` takes them; all by default."),
    ] = None
