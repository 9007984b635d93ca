"""The numbers of the CoTTA paper (Wang et al., CVPR 2022), and whether they may be shown next to a table."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from ctta.benchmark.report.runs import MethodEntry
from ctta.benchmark.report.tables import ColumnLayout, parse_severity
from ctta.data.datasets.scenes import CONDITIONS
from ctta.data.streams.sequences import corruption_order
from ctta.evaluation.metrics import ERROR, MIOU, Metric


@dataclass(frozen=True)
class PublishedRow:
    """The published numbers of one method: error or mIoU in percent."""

    mean: float
    deviation: float | None = None
    columns: Mapping[str, float] = field(default_factory=dict)  # empty if the paper prints only the mean


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper, and what its numbers were measured on."""

    rows: Mapping[str, PublishedRow]
    num_images: int  # per segment
    batch_size: int
    orders: tuple[int | None, ...]  # None is the standard order
    metric: Metric = ERROR
    num_rounds: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Corruptions, or domains in rounds; empty if only means were published."""
        return next((tuple(row.columns) for row in self.rows.values() if row.columns), ())


def find_published_table(
    entries: Sequence[MethodEntry], layout: ColumnLayout
) -> tuple[PublishedTable | None, tuple[str, ...]]:
    """Return the published table of the entries' recipe, and notes on how the entries differ from it.

    The table is None if nothing was published for the recipe, or if the stream is not the published one; in the
    latter case a note says why.
    """
    recipes = {result.labels.get("recipe") for entry in entries for result in entry.results}
    table = PUBLISHED.get(str(recipes.pop())) if len(recipes) == 1 else None
    if table is None:
        return None, ()
    orders = tuple(dict.fromkeys(order for entry in entries for order in entry.orders))
    changes = (change for entry in entries for result in entry.results for change in result.labels.get("changed", ()))
    protocol = next((change for change in changes if change.startswith("--protocol ")), None)
    reason = f"these are of {protocol}" if protocol else _compare_streams(table, layout, orders)
    metric = entries[0].results[0].metric
    if not reason and metric != table.metric:
        reason = f"they are {table.metric.name}, and these are {metric.name}"
    if reason:
        return None, (f"Published numbers are not shown: {reason}.",)
    return table, tuple(_list_differences(table, entries, orders))


def _compare_streams(table: PublishedTable, layout: ColumnLayout, orders: Sequence[int | None]) -> str:
    """Return why the stream is not the published one; empty if it is."""
    if table.num_rounds > 1:
        is_same = layout.columns == table.columns  # the last column names the last round
        domains = ", ".join(dict.fromkeys(column.split(",")[0] for column in table.columns))
        return "" if is_same else f"they are for {domains}, {table.num_rounds} rounds"
    is_gradual = not table.columns and layout.by == "corruption"
    severities = {parse_severity(column) for column in layout.columns}
    if layout.is_repeating:
        return "this stream repeats itself"
    if {column.split(" ")[0] for column in layout.columns} != set(corruption_order(None)):
        return "they are for the fifteen corruptions"
    if not is_gradual and severities != {"5"}:
        return "they are for severity 5"
    if table.columns and tuple(orders) != table.orders:
        return "they are for the standard order of the corruptions"
    return ""


def _list_differences(table: PublishedTable, entries: Sequence[MethodEntry], orders: Sequence[int | None]) -> list[str]:
    """Return what differs from the setup of the paper, one sentence each."""
    results = [result for entry in entries for result in entry.results]
    num_images = {segment.num_images for result in results for segment in result.segments}
    batch_sizes = {result.batches[0].score.num_images for result in results}
    notes = []
    changed = tuple(dict.fromkeys(change for result in results for change in result.labels.get("changed", ())))
    if changed:
        notes.append(f"Run with {', '.join(changed)}; the published numbers are for the authors' network and settings.")
    if num_images != {table.num_images} or batch_sizes != {table.batch_size}:
        noun = "image" if num_images == {1} else "images"
        ours = f"{_format_range(num_images)} {noun} per domain in batches of {_format_range(batch_sizes)}"
        theirs = f"{table.num_images:,} images in batches of {table.batch_size}"
        notes.append(f"Measured on {ours}; the published numbers on {theirs}.")
    if set(orders) != set(table.orders):
        notes.append(f"The published means are over {len(table.orders)} orders, these over {len(orders)}.")
    return notes


def _format_range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _read_rows(table: str, columns: Sequence[str] = ()) -> dict[str, PublishedRow]:
    """Return the rows of a table in ``published.csv``; the numbers of a single round stand for all rounds."""
    rows = {}
    for row in csv.DictReader((files("ctta.benchmark.report") / "published.csv").read_text().splitlines()):
        if row["table"] == table:
            numbers = [float(number) for number in row["numbers"].split()]
            named = zip(columns, numbers * (len(columns) // len(numbers)), strict=True) if numbers else ()
            deviation = float(row["deviation"]) if row["deviation"] else None
            rows[row["method"]] = PublishedRow(float(row["mean"]), deviation, dict(named))
    return rows


_CORRUPTIONS = corruption_order(None)
_ROUNDS = tuple(f"{condition}, round {number}" for number in (1, 4, 7, 10) for condition in CONDITIONS)
_TEN_ORDERS = tuple(range(10))

PUBLISHED: dict[str, PublishedTable] = {
    "cifar10c": PublishedTable(_read_rows("cifar10c", _CORRUPTIONS), num_images=10_000, batch_size=200, orders=(None,)),
    "cifar100c": PublishedTable(
        _read_rows("cifar100c", _CORRUPTIONS), num_images=10_000, batch_size=200, orders=(None,)
    ),
    "cifar10c-gradual": PublishedTable(
        _read_rows("cifar10c-gradual"), num_images=10_000, batch_size=200, orders=_TEN_ORDERS
    ),
    "imagenetc": PublishedTable(_read_rows("imagenetc"), num_images=5_000, batch_size=64, orders=_TEN_ORDERS),
    "acdc": PublishedTable(
        _read_rows("acdc", _ROUNDS), num_images=400, batch_size=1, orders=(None,), metric=MIOU, num_rounds=10
    ),
}
