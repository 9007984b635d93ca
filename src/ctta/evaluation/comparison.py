"""Compare methods on the same data by their errors, with intervals."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset

from ctta.core.model import AdaptiveModel
from ctta.core.registry import adapt
from ctta.data.datasets import IGNORE_INDEX
from ctta.data.streams import Stream
from ctta.errors import ConfigError, InputError
from ctta.evaluation.display import (
    NO_NUMBER,
    format_range,
    make_frame,
    plot_methods,
    render_html_table,
    render_text_table,
    shorten_name,
    strip_hashes,
    to_points,
    write_headline,
)
from ctta.evaluation.inputs import PlainBatches, as_batches, as_model
from ctta.evaluation.intervals import Interval, estimate_difference
from ctta.evaluation.loop import evaluate, evaluate_together
from ctta.evaluation.metrics import Metric
from ctta.evaluation.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results of several methods on the same data; printed, it is a table with 95 % intervals.

    Attributes:
        results: The results by name, in the order in which they were given.

    Raises:
        InputError: There is no result, or they saw different batches, or there are no labels.
    """

    results: Mapping[str, Result]

    def __post_init__(self) -> None:
        if not self.results:
            raise InputError("expected at least one method to compare, got none")
        if not all(result.is_labeled for result in self.results.values()):
            raise InputError(
                "methods are compared by their error, and this data has no labels: give batches (x, y), or look at the "
                "confidence of each result of ctta.evaluate"
            )
        if len({result.stream_hash for result in self.results.values()}) > 1:
            raise InputError("these results saw different batches and are not comparable: compare them on one stream")

    @property
    def metric(self) -> Metric:
        """The metric: error for labels of images, mIoU for labels of pixels."""
        return next(iter(self.results.values())).metric

    @property
    def ranking(self) -> list[str]:
        """The names of the methods, the best first."""
        sign = 1 if self.metric.best == "lowest" else -1
        return sorted(self.results, key=lambda name: sign * self.results[name].value)

    @property
    def best(self) -> str:
        """The name of the best method; ``is_decided`` says whether noise could have chosen it."""
        return self.ranking[0]

    @property
    def is_decided(self) -> bool:
        """Whether the best method leads the next by more than noise: the interval of their difference excludes zero."""
        if len(self.results) == 1:
            return True
        lead = self.difference(*self.ranking[:2])
        return lead is not None and lead.excludes_zero

    def difference(self, one: str, other: str) -> Interval | None:
        """Return by how much two methods differ, as a fraction: ``one`` minus ``other``, paired batch by batch.

        Args:
            one: Name of a method.
            other: Name of another method.

        Returns:
            The difference with its 95 % interval; None if the stream has too few batches for one.

        Raises:
            InputError: There is no such name.
        """
        for name in (one, other):
            if name not in self.results:
                raise InputError(f"there is no result {name!r}; expected one of {', '.join(map(repr, self.results))}")
        return estimate_difference([self.results[one]], [self.results[other]])

    def to_records(self) -> list[dict[str, Any]]:
        """Return one row per method: the metric, its interval, the difference to the best method, and the cost.

        ``peak_mib`` is None where it is not measured: by a system that does not report it, and in data that can be read
        only once, whose batches go through all methods in turn.
        """
        records = []
        for name, result in self.results.items():
            interval, gap = result.interval, None if name == self.best else self.difference(name, self.best)
            records.append(
                {
                    "method": name,
                    self.metric.key: result.value,
                    "low": interval.low if interval else None,
                    "high": interval.high if interval else None,
                    "difference_to_best": result.value - self.results[self.best].value,
                    "difference_low": gap.low if gap else None,
                    "difference_high": gap.high if gap else None,
                    "calibration_error": result.calibration_error,
                    "ms_per_image": result.ms_per_image,
                    "peak_mib": result.peak_mib,
                    "update_share": result.update_share,
                }
            )
        return records

    def to_frame(self) -> Any:
        """Return the rows of :meth:`to_records` as a pandas DataFrame; needs pandas."""
        return make_frame(self.to_records())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw one point per method with its 95 % interval; ``result.plot(ax)`` draws a method over time.

        Args:
            ax: Axes to draw into; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plot_methods(self.results, ax)

    @property
    def headline(self) -> str:
        """The outcome in a sentence, with its uncertainty."""
        ranking = [(name, [self.results[name]]) for name in self.ranking]
        return write_headline(self.metric, ranking, ("one run", "one run each", "one run each"))

    def __repr__(self) -> str:
        return f"{self._describe_data()}\n{render_text_table(self._format_rows())}\n{self.headline}"

    def _repr_html_(self) -> str:
        return render_html_table(self._describe_data(), self._format_rows(), self.headline)

    def _describe_data(self) -> str:
        first = next(iter(self.results.values()))
        return f"Comparison on {shorten_name(strip_hashes(first.stream))} ({first.total.num_images:,} images)"

    def _format_rows(self) -> list[dict[str, Any]]:
        rows = []
        has_peaks = any(result.peak_mib is not None for result in self.results.values())
        for name, result in self.results.items():
            gap = None if name == self.best else self.difference(name, self.best)
            share, peak = result.update_share, result.peak_mib
            value, best = (to_points(each.value) for each in (result, self.results[self.best]))
            rows.append(
                {
                    "": name,
                    f"{self.metric.name} %": f"{value:.1f}",
                    "95 % interval": format_range(result.interval),
                    f"minus {shorten_name(self.best, 20)}": "" if name == self.best else f"{value - best:+.1f}",
                    "95 % interval ": "" if name == self.best else format_range(gap),
                    "ECE %": f"{to_points(result.calibration_error):.1f}",
                    "ms/image": f"{result.ms_per_image:.2f}",
                    **({"peak MiB": NO_NUMBER if peak is None else f"{peak:,}"} if has_peaks else {}),
                    "updates %": NO_NUMBER if share is None else f"{100 * share:.0f}",
                }
            )
        return rows


#: What a method may be given as: a model, a plain network, the name of a method, or its class.
Method = AdaptiveModel | nn.Module | str | type[AdaptiveModel]


def compare(
    models: Mapping[str, Method] | Iterable[Method],
    stream: Stream | Iterable[Any] | Dataset[Any],
    *,
    net: nn.Module | None = None,
    batch_size: int | None = None,
    reset_at_domain: bool = False,
    ignore_index: int = IGNORE_INDEX,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Comparison:
    """Evaluate several methods on the same data.

    A stream is evaluated by one method after the other. Data that can be read only once, or that a loader shuffles, is
    read once, and every batch goes through all methods.

    Args:
        models: Methods by the names that the table shows, or a list of them. A method is a new model
            (``ctta.Tent(net)``), a plain network (evaluated as :class:`ctta.Source`), the name of a method
            (``"tent"``), or its class.
        stream: The data, with labels, as for :func:`ctta.evaluate`.
        net: The network for methods that are given by name or class; by default the only plain network of ``models``.
        batch_size: As for :func:`ctta.evaluate`.
        reset_at_domain: As for :func:`ctta.evaluate`.
        ignore_index: The label of pixels that are not scored.
        folder: Where to write the evaluations, one folder each; ``ctta report FOLDER`` makes a page of them. The
            evaluations of a stream are resumed from it.
        progress: Whether to show the progress on standard error.

    Returns:
        A table with 95 % intervals, see :mod:`ctta.evaluation.intervals` for how they are computed.

    Raises:
        ConfigError: A name or a model is given twice, or a method has no network.
        InputError: The data has no labels.

    >>> import torch, ctta
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    >>> batches = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> comparison = ctta.compare({"source": net, "tent": "tent"}, batches)
    >>> list(comparison.results), comparison.best in comparison.results
    (['source', 'tent'], True)
    """
    named = _name_methods(models)
    folders = {} if folder is None else _name_folders(Path(folder), list(named))
    built = _build_models(named, net)
    batches = as_batches(stream, next(iter(built.values())), batch_size)
    if isinstance(batches, PlainBatches):
        return Comparison(
            evaluate_together(
                built,
                batches,
                reset_at_domain=reset_at_domain,
                ignore_index=ignore_index,
                folders=folders,
                labels=None,
                progress=progress,
            )
        )
    results = {}
    for name in list(built):
        results[name] = evaluate(
            built.pop(name),
            batches,
            reset_at_domain=reset_at_domain,
            ignore_index=ignore_index,
            folder=folders.get(name),
            name=name,
            progress=progress,
        )
    return Comparison(results)


def _name_methods(models: Mapping[str, Method] | Iterable[Method]) -> dict[str, Method]:
    """Return methods by the names that they are given, or those of a list under their own names."""
    if isinstance(models, nn.Module | str | type):
        raise TypeError("expected several methods, got one: give a dictionary such as {'source': net, 'tent': 'tent'}")
    if isinstance(models, Mapping):
        named = {str(name): model for name, model in models.items()}
    else:
        named = {}
        for model in models:
            if isinstance(model, str):
                name = model
            elif isinstance(model, nn.Module) and not isinstance(model, AdaptiveModel):
                name = "source"
            else:
                name = model.__name__ if isinstance(model, type) else type(model).__name__
            if name in named:
                raise ConfigError(f"two methods are called {name!r}: give a dictionary with a name for each")
            named[name] = model
    if not named:
        raise InputError("expected at least one method to compare, got none")
    return named


def _build_models(named: Mapping[str, Method], net: nn.Module | None) -> dict[str, AdaptiveModel]:
    plain = [model for model in named.values() if isinstance(model, nn.Module) and not isinstance(model, AdaptiveModel)]
    if net is None and len(plain) == 1:
        (net,) = plain
    given = [id(model) for model in named.values() if isinstance(model, AdaptiveModel)]
    if len(set(given)) < len(given):
        raise ConfigError("the same model is given twice, and each needs its own: pass model.fork()")
    built = {}
    for name, model in named.items():
        if not isinstance(model, str | type):
            built[name] = as_model(model)
        elif net is None:
            raise ConfigError(f"{name!r} needs a network to adapt: pass net=")
        else:
            built[name] = adapt(net, model) if isinstance(model, str) else model(net)
    return built


def _name_folders(root: Path, names: list[str]) -> dict[str, Path]:
    """Return a folder for each name, without characters that file systems refuse."""
    folders = {name: root / (re.sub(r"[^\w.+-]+", "_", name).strip("._") or "method") for name in names}
    if len({str(path).lower() for path in folders.values()}) < len(names):
        raise ConfigError(f"names must differ in letters and digits to name folders, got {', '.join(names)}")
    return folders
