"""The results of several methods on the same data, as a table with an interval for every number and difference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctta.errors import InputError
from ctta.evaluation.display import (
    describe_best,
    format_percent,
    format_range,
    make_frame,
    render_html_table,
    render_text_table,
    shorten_name,
    strip_hashes,
)
from ctta.evaluation.intervals import Interval, estimate_difference
from ctta.evaluation.metrics import Metric
from ctta.evaluation.plots import plot_methods
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
        """Return one row per method: the metric, its interval, the difference to the best method, and the cost."""
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
        values = {name: result.value for name, result in self.results.items()}
        intervals = {name: result.interval for name, result in self.results.items()}
        return plot_methods(values, intervals, self.metric, ax)

    @property
    def headline(self) -> str:
        """The outcome in a sentence, with its uncertainty."""
        names = self.ranking
        first = self.results[names[0]]
        if len(names) == 1:
            interval = f", 95 % interval {format_range(first.interval)}" if first.interval else ""
            return f"{names[0]} has a mean {self.metric.name} of {format_percent(first.value)}{interval}; one run."
        if len({format_percent(result.value) for result in self.results.values()}) == 1:
            return f"All rows have the same mean {self.metric.name}, {format_percent(first.value)}; one run each."
        lead, second = self.difference(names[0], names[1]), self.results[names[1]]
        sentence = describe_best(
            self.metric,
            names[0],
            first.value,
            runner_up=names[1],
            runner_up_value=second.value,
            lead=lead,
            runs="one run each",
        )
        return f"{sentence}."

    def __repr__(self) -> str:
        return f"{self._describe_data()}\n{render_text_table(self._format_rows())}\n{self.headline}"

    def _repr_html_(self) -> str:
        return render_html_table(self._describe_data(), self._format_rows(), self.headline)

    def _describe_data(self) -> str:
        first = next(iter(self.results.values()))
        return f"Comparison on {shorten_name(strip_hashes(first.stream))} ({first.total.num_images:,} images)"

    def _format_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, result in self.results.items():
            gap = None if name == self.best else self.difference(name, self.best)
            value, best = (round(100 * each.value, 1) for each in (result, self.results[self.best]))
            rows.append(
                {
                    "": name,
                    f"{self.metric.name} %": f"{value:.1f}",
                    "95 % interval": format_range(result.interval),
                    f"minus {shorten_name(self.best, 20)}": "" if name == self.best else f"{value - best:+.1f}",
                    "95 % interval ": "" if name == self.best else format_range(gap),
                    "ms/image": f"{result.ms_per_image:.2f}",
                }
            )
        return rows
