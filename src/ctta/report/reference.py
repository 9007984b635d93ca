"""Whether the paper's numbers may stand beside a table, and what a reader must know if they do."""

from collections.abc import Sequence

from ctta.report.entries import Entry
from ctta.report.layout import Layout, severity_of
from ctta.report.published import PUBLISHED, PublishedTable
from ctta.streams.orders import corruption_order


def published_table(entries: Sequence[Entry], layout: Layout) -> tuple[PublishedTable | None, tuple[str, ...]]:
    """The published table of the entries' recipe, if it is about these streams, and how they differ from it."""
    recipes = {result.labels.get("recipe") for entry in entries for result in entry.results}
    table = PUBLISHED.get(str(recipes.pop())) if len(recipes) == 1 else None
    if table is None:
        return None, ()
    orders = tuple(dict.fromkeys(order for entry in entries for order in entry.orders))
    if reason := _other_stream(table, layout, orders) or _other_measure(table, entries):
        return None, (f"The published numbers are not shown: {reason}.",)
    return table, tuple(_differences(table, entries, orders))


def _other_stream(table: PublishedTable, layout: Layout, orders: Sequence[int | None]) -> str:
    """Why the stream is not the published one at all; empty if it is."""
    if table.num_rounds > 1:
        same = layout.columns == table.columns  # the last of which names the last round
        domains = ", ".join(dict.fromkeys(column.split(",")[0] for column in table.columns))
        return "" if same else f"they are about {domains}, {table.num_rounds} rounds"
    full = bool(table.columns)
    gradual = not full and layout.by == "kind"
    severities = {severity_of(column) for column in layout.columns}
    if layout.repeats:
        return "this stream repeats itself"
    if {column.split(" ")[0] for column in layout.columns} != set(corruption_order(None)):
        return "they are about the fifteen corruptions"
    if not gradual and severities != {"5"}:
        return "they are about severity 5"
    if full and tuple(orders) != table.orders:
        return "they are about the standard order of the corruptions"
    return ""


def _other_measure(table: PublishedTable, entries: Sequence[Entry]) -> str:
    ours = entries[0].results[0].metric
    return "" if ours == table.measure else f"they are {table.measure.name}, and these are {ours.name}"


def _differences(table: PublishedTable, entries: Sequence[Entry], orders: Sequence[int | None]) -> list[str]:
    """What was done otherwise than in the paper, one sentence each."""
    results = [result for entry in entries for result in entry.results]
    images = {segment.count for result in results for segment in result.segments}
    batch = {result.batches[0].score.count for result in results}
    notes = []
    changed = tuple(dict.fromkeys(change for result in results for change in result.labels.get("changed", ())))
    if changed:
        notes.append(f"Run with {', '.join(changed)}; the published numbers are of the authors' network and settings.")
    if images != {table.num_images} or batch != {table.batch_size}:
        ours = f"{_range(images)} images of each domain in batches of {_range(batch)}"
        theirs = f"{table.num_images:,} in batches of {table.batch_size}"
        notes.append(f"Measured here on {ours}; the published numbers on {theirs}.")
    if set(orders) != set(table.orders):
        notes.append(f"The published means are over {len(table.orders)} orders, these over {len(orders)}.")
    return notes


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
