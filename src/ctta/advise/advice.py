"""What :func:`ctta.advise` returns: facts, a table, a recommendation, and the configuration to use it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn

from ctta.advise.candidates import Candidate
from ctta.advise.input_check import InputCheck
from ctta.advise.race import CHEAP, Race, RaceRow, RaceSettings
from ctta.core.config import AdaptationConfig, relative_model
from ctta.core.model import AdaptiveModel
from ctta.core.registry import resolve_method
from ctta.evaluation.display import format_range, join_names, render_text_table
from ctta.evaluation.intervals import estimate_interval
from ctta.guard import GainEstimator


@dataclass(frozen=True)
class NetworkFacts:
    """What a network is.

    Attributes:
        name: Its class.
        num_parameters: Number of its parameters.
        num_classes: Number of its classes.
        norm_layers: How many normalization layers of each class it has.
        input_check: Whether it expects the images that it is given.
    """

    name: str
    num_parameters: int
    num_classes: int
    norm_layers: Mapping[str, int]
    input_check: InputCheck


@dataclass(frozen=True)
class PictureFacts:
    """What the pictures are that a network was judged on.

    Attributes:
        num_images: Their number.
        size: (height, width).
        reference: What errors are counted against.
        has_labels: Whether that is labels.
        clean_error: Error of the network on them as they are; None without labels.
        confidence: Mean confidence of the network on them as they are.
    """

    num_images: int
    size: tuple[int, int]
    reference: str
    has_labels: bool
    clean_error: float | None
    confidence: float


@dataclass(frozen=True, repr=False)
class Advice:
    """Which method and settings suit a network and its stream; printed, it is a page of text.

    Attributes:
        network: What the network is.
        pictures: What it was judged on.
        settings: Corruptions, batch size and order of the stream.
        race: The results of all methods that were tried, and why others were not.
        net: The network.
        estimator: What estimates the accuracy of the recommended method without labels; None for Source.
    """

    network: NetworkFacts
    pictures: PictureFacts
    settings: RaceSettings
    race: Race
    net: nn.Module
    estimator: GainEstimator | None = None

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

    def config(self, candidate: Candidate | None = None) -> AdaptationConfig:
        """Return the configuration of a candidate, by default of the recommended one.

        Args:
            candidate: The candidate.

        Returns:
            What ``ctta.toml`` has of it.
        """
        row = self.recommended
        chosen = candidate or row.candidate
        settings = dict(chosen.settings)
        if "batch_stats" in signature(resolve_method(chosen.method).method).parameters:
            # As it was tried: 'ctta adapt' would blend the statistics of methods that leave the choice to it.
            settings.setdefault("batch_stats", chosen.build(self.net).batch_stats)
        evidence: dict[str, Any] = {
            "error": round(row.result.error, 4),
            "source_error": round(self.race.source.result.error, 4),
            "images": self.race.num_final,
            "labels": self.pictures.has_labels,
            "corruptions": [name for name, _ in self.settings.steps],
            "severities": [float(severity) for _, severity in self.settings.steps],
            "order": self.settings.order,
        }
        if row.difference:
            evidence |= {"gain_low": round(-row.difference.high, 4), "gain_high": round(-row.difference.low, 4)}
        tables = {"evidence": evidence} if candidate is None else {}
        if candidate is None and self.estimator is not None:
            tables["estimate"] = self.estimator.as_dict()
        return AdaptationConfig(chosen.method, settings, batch_size=self.settings.batch_size, tables=tables)

    def save(
        self,
        path: str | os.PathLike[str] = "ctta.toml",
        *,
        model: str | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
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
        found = self.config()
        config = AdaptationConfig(
            found.method,
            found.settings,
            model=None if model is None else relative_model(model, path),
            mean=mean,
            std=std,
            size=size,
            batch_size=found.batch_size,
            tables=found.tables,
        )
        config.write(path, comment=[*self.verdict, "", *(f"  {line}" for line in self.table.splitlines())])

    @property
    def python(self) -> str:
        """The recommendation as a line of Python."""
        return self._format_python(self.recommended.candidate)

    def _format_python(self, candidate: Candidate) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.config(candidate).settings.items())
        return f'model = ctta.adapt(net, "{candidate.method}"{arguments})'

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
                    "error %": f"{100 * row.result.error:.1f}{half}",
                    "minus Source": "" if row.difference is None else f"{100 * row.difference.estimate:+.1f}",
                    "95 % interval": "" if row.difference is None else format_range(row.difference),
                    "clean %": f"{100 * row.result.errors[-1]:.1f}",
                    "ms/image": f"{row.result.ms_per_image:.2f}",
                    "memory": _format_mebibytes(row.memory),
                }
            )
        return render_text_table(rows)

    @property
    def verdict(self) -> list[str]:
        """What follows from the table, in sentences."""
        chosen, cheap, source = self.recommended, self.cheap, self.race.source
        if chosen is source:
            lines = ["Recommended: Source. No method is significantly better than the network without adaptation."]
            if self.race.finalists:
                best = self.race.finalists[0]
                lines.append(f"The best one, {best.candidate.label}, differs by {_describe_gain(best)}.")
            return lines
        lines = [f"Recommended: {chosen.candidate.label}, {_describe_gain(chosen)} than Source."]
        if (loss := chosen.result.errors[-1] - source.result.errors[-1]) > 0.01:
            lines.append(f"On clean pictures, after the others, it has {100 * loss:.1f} points more error than Source.")
        if cheap is not chosen:
            what = "Source" if cheap is source else f"{cheap.candidate.label}, {_describe_gain(cheap)} than Source"
            lines.append(f"If it must be cheap (at most {CHEAP:g} times the time of Source): {what}.")
        return lines

    def __repr__(self) -> str:
        network, pictures, given = self.network, self.pictures, self.settings
        layers = ", ".join(f"{count} {kind}" for kind, count in network.norm_layers.items()) or "no norm layers"
        clean = "" if pictures.clean_error is None else f", error as they are {100 * pictures.clean_error:.1f} %"
        corruptions = ", ".join(name if name == "none" else f"{name} {severity:g}" for name, severity in given.steps)
        lines = [
            f"Network:  {network.name}, {network.num_parameters / 1e6:.2f} M parameters, "
            f"{network.num_classes} classes, {layers}",
            f"Pictures: {pictures.num_images} of {pictures.size[0]}x{pictures.size[1]}, scored against "
            f"{pictures.reference}{clean}",
            network.input_check.describe().replace("Input: ", "Input:    "),
            f"Stream:   batches of {given.batch_size}, {given.order}; {corruptions.replace('none', 'clean')}; "
            f"{self.race.num_final} pictures each",
            "",
            self.table,
            "",
        ]
        if self.race.dropped:
            texts = [f"{row.candidate.label} {_format_points(row)}" for row in self.race.dropped]
            lines.append(
                f"Dropped after {self.race.num_screened} pictures each (points above Source): {'; '.join(texts)}."
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.race.left_out.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"Not tried: {join_names(names, 12)} ({reason})." for reason, names in reasons.items()]
        return "\n".join([*lines, "", *self.verdict, "", self.python])


def _describe_gain(row: RaceRow) -> str:
    points = f"{abs(100 * row.gain):.1f} points {'less' if row.gain >= 0 else 'more'} error"
    return points if row.difference is None else f"{points} (95 % interval {_range_of(row)})"


def _range_of(row: RaceRow) -> str:
    assert row.difference is not None
    if not row.difference.excludes_zero:
        return format_range(row.difference)
    low, high = sorted(100 * abs(end) for end in (row.difference.low, row.difference.high))
    return f"{low:.1f} to {high:.1f}"


def _format_points(row: RaceRow) -> str:
    return "" if row.difference is None else f"{100 * row.difference.estimate:+.1f}"


def _format_mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 100 * 2**20 else f"{size / 2**20:.0f} MiB"
