"""Find out whether adaptation helps a network, and which method and settings."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from torch import nn
from typing_extensions import deprecated

from ctta.advise.candidates import count_norm_layers, list_candidates
from ctta.advise.images import (
    DEFAULT_CORRUPTIONS,
    STREAM_ORDERS,
    ImageOptions,
    ImageSource,
    ImageStreams,
    StreamOrder,
)
from ctta.advise.input_check import InputCheck, read_images
from ctta.advise.race import CHEAP, DEFAULT, Race, RaceRow, RaceSettings, run_race
from ctta.core.config import AdaptationConfig, relative_model
from ctta.core.model import AdaptiveModel
from ctta.core.options import Amp, Option, parse_names, takes_options
from ctta.core.registry import resolve_method
from ctta.core.validation import check_choice, check_integer, check_positive
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.base import CLEAN
from ctta.evaluation.display import (
    format_percent,
    format_range,
    join_names,
    render_text_table,
    subtract_printed,
    to_points,
)
from ctta.evaluation.intervals import estimate_interval, judge
from ctta.models import Normalized


@dataclass(frozen=True)
class NetworkFacts:
    """What a network is."""

    name: str  # its class
    num_parameters: int
    num_classes: int
    norm_layers: Mapping[str, int]  # how many of each class
    input_check: InputCheck


@dataclass(frozen=True)
class ImageFacts:
    """What the images are that a network was judged on; ``clean_error`` and ``confidence`` are on them as they are."""

    num_images: int
    size: tuple[int, int]  # (height, width)
    reference: str  # what errors are counted against
    has_labels: bool
    clean_error: float | None  # None without labels
    confidence: float


@dataclass(frozen=True, repr=False)
class Advice:
    """Which method and settings suit a network and its stream; printed, it is a page of text.

    Attributes:
        network: What the network is.
        images: What it was judged on.
        settings: Corruptions, batch size and order of the stream.
        race: The results of all methods that were tried, and why others were not.
        net: The network.
    """

    network: NetworkFacts
    images: ImageFacts
    settings: RaceSettings
    race: Race
    net: nn.Module

    @property
    @deprecated("Advice.pictures is called Advice.images now")
    def pictures(self) -> ImageFacts:
        """The former name of :attr:`images`."""
        return self.images

    @property
    def recommended(self) -> RaceRow:
        """The cheapest candidate that no more expensive one is significantly better than."""
        return self.race.choose()

    @property
    def cheap(self) -> RaceRow:
        """The same among those that take at most twice the time of Source."""
        return self.race.choose(max_cost=CHEAP)

    def build(self) -> AdaptiveModel:
        """Return a new model of the recommended method around the network."""
        return self.config().build(self.net)

    def config(self) -> AdaptationConfig:
        """Return the recommended configuration, as ``ctta.toml`` has it."""
        row = self.recommended
        chosen = row.candidate
        settings = dict(chosen.settings) | ({"amp": chosen.amp} if chosen.amp else {})
        if "batch_stats" in signature(resolve_method(chosen.method).method).parameters:
            # As it was tried: 'ctta adapt' would blend the statistics of methods that leave the choice to it.
            settings.setdefault("batch_stats", chosen.build(self.net).batch_stats)
        evidence: dict[str, Any] = {
            "error": round(row.result.error, 4),
            "source_error": round(self.race.source.result.error, 4),
            "images": self.race.num_final,
            "labels": self.images.has_labels,
            "corruptions": [name for name, _ in self.settings.steps],
            "severities": [float(severity) for _, severity in self.settings.steps],
            "order": self.settings.order,
        }
        if row.difference:
            evidence |= {"gain_low": round(-row.difference.high, 4), "gain_high": round(-row.difference.low, 4)}
        return AdaptationConfig(
            chosen.method, settings, batch_size=self.settings.batch_size, tables={"evidence": evidence}
        )

    def save(
        self,
        path: str | os.PathLike[str] = "ctta.toml",
        *,
        model: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Write the recommended configuration, for ``ctta adapt --config``, ``ctta serve`` and ``ctta.from_config``.

        Args:
            path: The file.
            model: Name of the network, as :func:`ctta.models.load` takes it; without it, :func:`ctta.from_config` is
                given the network.
            mean: Mean of each channel that images are normalized by in front of that network.
            std: Standard deviation of each channel.
            size: (height, width) that images are resized to.
        """
        config = replace(
            self.config(),
            model=None if model is None else relative_model(model, path),
            mean=None if mean is None else tuple(mean),
            std=None if std is None else tuple(std),
            size=size,
        )
        config.write(path, comment=[*self.verdict, "", *(f"  {line}" for line in self.table.splitlines())])

    @property
    def python(self) -> str:
        """The recommendation as a line of Python."""
        config = self.config()
        arguments = "".join(f", {name}={value!r}" for name, value in config.settings.items())
        return f'model = ctta.adapt(net, "{config.method}"{arguments})'

    @property
    def table(self) -> str:
        """The results of the final as text."""
        rows = []
        chosen = self.recommended
        for row in (self.race.source, *self.race.finalists):
            interval = estimate_interval([row.result], short_blocks=True)
            half = "" if interval is None else f" ±{50 * (interval.high - interval.low):.1f}"
            rows.append(
                {
                    "": f"{'*' if row is chosen else ' '} {row.candidate.label}",
                    "error %": f"{to_points(row.result.error):.1f}{half}",
                    "minus Source": "" if row is self.race.source else _minus(row, self.race.source),
                    "95 % interval": "" if row.difference is None else format_range(row.difference),
                    "clean %": f"{to_points(row.result.errors[-1]):.1f}",
                    "ms/image": f"{row.result.ms_per_image:.2f}",
                    "memory": f"{row.memory / 2**20:.{1 if row.memory < 100 * 2**20 else 0}f} MiB",
                }
            )
        return render_text_table(rows)

    @property
    def verdict(self) -> list[str]:
        """What follows from the table, in sentences."""
        chosen, cheap, source = self.recommended, self.cheap, self.race.source
        default = self.race.default
        if chosen is source:
            lines = ["Recommended: Source. No method is significantly better than the network without adaptation."]
            if default is not None:
                clean = subtract_printed(default.result.errors[-1], source.result.errors[-1])
                lines.append(
                    f"{default.candidate.label}, the default, has lost: {_describe_gain(default, source)} than Source, "
                    f"and on the clean images {abs(clean):.1f} points {'more' if clean > 0 else 'less'}."
                )
            else:
                lines.append(f"The default could not be measured: {self.race.left_out[DEFAULT.key]}.")
            if (best := self.race.finalists[:1]) and best[0] is not default:
                lines.append(f"The best one, {best[0].candidate.label}, has {_describe_gain(best[0], source)}.")
            return lines
        lines = [f"Recommended: {chosen.candidate.label}, {_describe_gain(chosen, source)} than Source."]
        if chosen is default and judge(chosen.difference) == "unclear":
            lines.append("This is within noise: the default has not lost, and no method is significantly better.")
        if default is not None and default is not chosen:
            lines.append(f"The default, {default.candidate.label}, has {_describe_gain(default, source)}.")
        if (loss := subtract_printed(chosen.result.errors[-1], source.result.errors[-1])) > 1:
            lines.append(f"On clean images, after the others, it has {loss:.1f} points more error than Source.")
        if cheap is not chosen:
            gain = "" if cheap is source else f", {_describe_gain(cheap, source)} than Source"
            what = f"{cheap.candidate.label}{gain}"
            lines.append(f"If it must be cheap (at most {CHEAP:g} times the time of Source): {what}.")
        return lines

    def __repr__(self) -> str:
        network, images, given = self.network, self.images, self.settings
        layers = ", ".join(f"{count} {kind}" for kind, count in network.norm_layers.items()) or "no norm layers"
        clean = "" if images.clean_error is None else f", error as they are {format_percent(images.clean_error)}"
        corruptions = ", ".join(name if name == "none" else f"{name} {severity:g}" for name, severity in given.steps)
        lines = [
            f"Network:  {network.name}, {network.num_parameters / 1e6:.2f} M parameters, "
            f"{network.num_classes} classes, {layers}",
            f"Images:   {images.num_images} of {images.size[0]}x{images.size[1]}, scored against "
            f"{images.reference}{clean}",
            *(
                [network.input_check.describe().replace("Input: ", "Input:    ")]
                if network.input_check.is_expected
                else []
            ),
            f"Stream:   batches of {given.batch_size}, {given.order}; {corruptions.replace('none', 'clean')}; "
            f"{self.race.num_final} images each",
            "",
            self.table,
            "",
        ]
        if self.race.dropped:
            texts = [
                f"{row.candidate.label} {'' if row.difference is None else f'{100 * row.difference.estimate:+.1f}'}"
                for row in self.race.dropped
            ]
            lines.append(
                f"Dropped after {self.race.num_screened} images each (points above Source): {'; '.join(texts)}."
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.race.left_out.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"Not tried: {join_names(names, 12)} ({reason})." for reason, names in reasons.items()]
        if not network.input_check.is_expected:
            warning = f"WARNING: {network.input_check.describe()}. What follows is about the network as it is."
            return "\n".join([warning, "", *lines, "", *self.verdict])
        return "\n".join([*lines, "", *self.verdict, "", self.python])


def _minus(row: RaceRow, source: RaceRow) -> str:
    return f"{0.0 - row.points_below(source):+.1f}"


def _describe_gain(row: RaceRow, source: RaceRow) -> str:
    """Return how much less error a row has, in the numbers of the table."""
    gain, found = row.points_below(source), row.difference
    points = f"{abs(gain):.1f} points {'less' if gain > 0 else 'more'} error" if gain else "no less error"
    if found is None:
        return f"{points} (too few batches for an interval)"
    less = gain >= 0
    ends = format_range(replace(found, low=-found.high, high=-found.low) if less else found)
    return f"{points} (95 % interval {ends})"


#: What ``quick`` tries, and on how many images.
QUICK_METHODS, QUICK_IMAGES = ("bn_stats", "tent", "cotta_fast"), 256
#: How many images are used by default, and batches if these have more.
NUM_IMAGES, NUM_BATCHES = 512, 10


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(ImageOptions):
    """The options of :func:`ctta.advise` and ``ctta advise``."""

    quick: Annotated[
        bool,
        Option(
            "Try vane, bn_stats, tent and cotta_fast, or vane and --methods, on 256 images at their published "
            "settings: a minute instead of ten."
        ),
    ] = False
    batch_size: Annotated[
        int, Option("Adapt to N images at a time; use the number of your application.", "N", min=1)
    ] = 32
    order: Annotated[
        StreamOrder,
        Option(
            "Show classes as your stream does: shuffled; correlated, a few at a time, as a camera sees them; or "
            "sorted, one after the other."
        ),
    ] = "shuffled"
    methods: Annotated[
        Sequence[str] | None,
        Option(
            "Try these methods beside the default one, such as tent,cotta_fast or file:PATH.py:Class (see: ctta "
            "methods). Default: all that can work.",
            "NAMES",
            parse=parse_names,
        ),
    ] = None
    corruptions: Annotated[
        Sequence[str],
        Option("Corrupt the images in these ways, such as fog,snow; clean ones follow.", "NAMES", parse=parse_names),
    ] = DEFAULT_CORRUPTIONS
    limit: Annotated[
        int | None,
        Option(
            "Use at most N randomly chosen images. Default: 512, or ten batches if that is more; 256 with --quick.",
            "N",
            min=16,
        ),
    ] = None
    budget: Annotated[
        float,
        Option(
            "Take about this many minutes; slow methods are left out for it, and vane_fast stands for vane.",
            "MINUTES",
            min=0.01,
        ),
    ] = 10.0
    seed: Annotated[int, Option("Seed the choice of images, the corruptions and the order.", "N", min=0)] = 0
    amp: Amp = None


@takes_options(AdviseOptions)
def advise(net: nn.Module, images: ImageSource, options: AdviseOptions) -> Advice:
    """Find out whether adaptation helps a network, and which method and settings, on the user's own images.

    First it checks that the network expects the images that it is given. Methods that cannot work are left out, each
    with a reason. The others, the default method first, adapt to the images under one corruption after the other, and
    to the clean images at the end: all of them on a part of the images, then the default and the best few on more.
    Other settings than the default ones are recommended only if they are also better on images that are held back for
    this. With ``quick``, a few methods adapt to all of the images, at their published settings. Without labels, errors
    are counted against the network's answers on the clean images.

    Args:
        net: The network, for images in [0, 1]; it is never changed.
        images: Clean images, like those that the network was trained on but not the same: a folder with or without a
            subfolder per class, an ``.npz`` file, uint8 (N, H, W, 3), or floats (N, 3, H, W) in [0, 1]. Some hundred
            are enough.
        options: The fields of :class:`AdviseOptions` as keywords.

    Returns:
        The advice: print it, ``advice.build()`` the recommended model, ``advice.save("ctta.toml")``.

    Raises:
        ConfigError: The network expects images in another normalization, or an argument is not valid.
        DataError: The images cannot be read, or their labels cannot be the network's classes.
        InputError: An array has another shape, or its values are not in [0, 1].
    """
    batch_size, order, corruptions = options.batch_size, options.order, options.corruptions
    check_choice("order", order, STREAM_ORDERS)
    check_integer("batch_size", batch_size, 1)
    check_positive("budget", options.budget)
    for name in corruptions:
        check_corruption(name, options.severity)
    methods = options.methods or (QUICK_METHODS if options.quick else None)
    for name in methods or ():
        resolve_method(name)
    default = QUICK_IMAGES if options.quick else max(NUM_IMAGES, NUM_BATCHES * batch_size)
    limit = default if options.limit is None else check_integer("limit", options.limit, 1)
    labeled, found = read_images(net, images, options, limit=limit, seed=options.seed)
    candidates, left_out = list_candidates(net, batch_size=batch_size, order=order, methods=methods)
    steps = (*((name, float(options.severity)) for name in corruptions), (CLEAN, 0.0))
    settings = RaceSettings(steps, batch_size, order, 60 * options.budget, options.seed, options.quick, options.amp)
    with nullcontext(options.folder) if options.folder else TemporaryDirectory(prefix="ctta-advise-") as path:
        race = run_race(net, ImageStreams(labeled), candidates, settings, Path(path), on_progress=options.on_progress)
    race.left_out = left_out | race.left_out
    height, width = labeled.images.shape[1:3]
    inner = net.net if isinstance(net, Normalized) else net
    return Advice(
        NetworkFacts(
            type(inner).__name__,
            sum(parameter.numel() for parameter in net.parameters()),
            labeled.num_classes,
            count_norm_layers(net),
            found,
        ),
        ImageFacts(
            len(labeled.images),
            (height, width),
            labeled.reference,
            labeled.has_labels,
            labeled.clean_error,
            labeled.confidence,
        ),
        settings,
        race,
        net,
    )
