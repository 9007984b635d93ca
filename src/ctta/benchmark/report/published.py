"""The numbers of the CoTTA paper (Wang et al., CVPR 2022), and whether they may be shown next to a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


def _errors(mean: float, errors: str, deviation: float | None = None) -> PublishedRow:
    """Return a row with the errors on the fifteen corruptions in their standard order."""
    numbers = (float(error) for error in errors.split())
    return PublishedRow(mean, deviation, dict(zip(corruption_order(None), numbers, strict=True)))


def _mious(mean: float, *rounds: str) -> PublishedRow:
    """Return a row with the mIoU in rounds 1, 4, 7 and 10; a single round stands for all of them."""
    columns = [f"{condition}, round {number}" for number in (1, 4, 7, 10) for condition in CONDITIONS]
    numbers = (float(number) for text in (rounds * 4)[:4] for number in text.split())
    return PublishedRow(mean, columns=dict(zip(columns, numbers, strict=True)))


_TEN_ORDERS = tuple(range(10))

PUBLISHED: dict[str, PublishedTable] = {
    "cifar10c": PublishedTable(
        {
            "Source": _errors(43.5, "72.3 65.7 72.9 46.9 54.3 34.8 42.0 25.1 41.3 26.0 9.3 46.7 26.6 58.5 30.3"),
            "BN Stats Adapt": _errors(
                20.4, "28.1 26.1 36.3 12.8 35.3 14.2 12.1 17.3 17.4 15.3 8.4 12.6 23.8 19.7 27.3"
            ),
            "Pseudo-label": _errors(19.8, "26.7 22.1 32.0 13.8 32.2 15.3 12.7 17.3 17.3 16.5 10.1 13.4 22.4 18.9 25.9"),
            "TENT-online*": _errors(18.6, "24.8 23.5 33.0 12.0 31.8 13.7 10.8 15.9 16.2 13.7 7.9 12.1 22.0 17.3 24.2"),
            "TENT-continual": _errors(
                20.7, "24.8 20.6 28.6 14.4 31.1 16.5 14.1 19.1 18.6 18.6 12.2 20.3 25.7 20.8 24.9"
            ),
            "CoTTA": _errors(16.2, "24.3 21.3 26.6 11.6 27.6 12.2 10.3 14.8 14.1 12.4 7.5 10.6 18.3 13.4 17.3", 0.1),
            "CoTTA: weight-avg": _errors(
                18.3, "27.2 22.8 30.8 12.1 30.1 13.9 11.9 17.2 16.0 14.3 9.4 13.1 19.9 15.4 19.9"
            ),
            "CoTTA: + aug-avg": _errors(
                17.4, "24.5 21.0 26.0 12.3 27.9 13.9 12.0 16.6 15.9 14.7 9.4 13.6 19.8 14.7 18.7"
            ),
        },
        num_images=10_000,
        batch_size=200,
        orders=(None,),
    ),
    "cifar100c": PublishedTable(
        {
            "Source": _errors(46.4, "73.0 68.0 39.4 29.3 54.1 30.8 28.8 39.5 45.8 50.3 29.5 55.1 37.2 74.7 41.2"),
            "BN Stats Adapt": _errors(
                35.4, "42.1 40.7 42.7 27.6 41.9 29.7 27.9 34.9 35.0 41.5 26.5 30.3 35.7 32.9 41.2"
            ),
            "Pseudo-label": _errors(46.2, "38.1 36.1 40.7 33.2 45.9 38.3 36.4 44.0 45.6 52.8 45.2 53.5 60.1 58.1 64.5"),
            "TENT-continual": _errors(
                60.9, "37.2 35.8 41.7 37.9 51.2 48.3 48.5 58.4 63.7 71.1 70.4 82.3 88.0 88.5 90.4"
            ),
            "CoTTA": _errors(32.5, "40.1 37.7 39.7 26.9 38.0 27.9 26.4 32.8 31.8 40.3 24.7 26.9 32.5 28.3 33.5"),
        },
        num_images=10_000,
        batch_size=200,
        orders=(None,),
    ),
    "cifar10c-gradual": PublishedTable(
        {
            "Source": PublishedRow(24.8),
            "BN Stats Adapt": PublishedRow(13.7),
            "TENT-continual": PublishedRow(30.7),
            "CoTTA": PublishedRow(10.4, 0.2),
        },
        num_images=10_000,
        batch_size=200,
        orders=_TEN_ORDERS,
    ),
    "imagenetc": PublishedTable(
        {
            "Source": PublishedRow(82.4),
            "BN Stats Adapt": PublishedRow(72.1),
            "Test Aug": PublishedRow(71.4),
            "TENT-continual": PublishedRow(66.5),
            "CoTTA": PublishedRow(63.0, 1.8),
        },
        num_images=5_000,
        batch_size=64,
        orders=_TEN_ORDERS,
    ),
    "acdc": PublishedTable(
        {
            "Source": _mious(56.7, "69.1 40.3 59.7 57.8"),
            "BN Stats Adapt": _mious(52.0, "62.3 38.0 54.6 53.0"),
            "TENT-continual": _mious(
                52.3, "69.0 40.2 60.1 57.3", "66.5 36.3 58.7 54.0", "64.2 32.8 55.3 50.9", "61.8 29.8 51.9 47.8"
            ),
            "CoTTA": _mious(
                58.6, "70.9 41.2 62.4 59.7", "70.9 41.0 62.7 59.7", "70.9 41.0 62.8 59.7", "70.8 41.0 62.8 59.7"
            ),
        },
        num_images=400,
        batch_size=1,
        orders=(None,),
        metric=MIOU,
        num_rounds=10,
    ),
}
