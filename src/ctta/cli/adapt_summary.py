"""What ``ctta adapt`` prints at the end."""

import os
from collections.abc import Sequence
from pathlib import Path

from ctta.adapt import InferenceSummary, NormalizedBatches

ORDER_LINES = {
    "shuffle": "Order: shuffled, always the same for the same names; --order name takes the images by path.",
    "name": "Order: by path.",
    "time": "Order: by time of modification.",
}


def format_summary(
    summary: InferenceSummary,
    predictions: Path,
    state: Path | None,
    *,
    asked_for_guard: bool | None,
    noun: str = "image",
    clip: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return the lines that the command prints.

    Args:
        summary: What was done.
        predictions: The table.
        state: The file of the state, if there is one.
        asked_for_guard: Whether the user asked for a guard, or for none.
        noun: What was predicted: "image" or "frame".
        clip: The annotated video, if there is one.
    """
    num_images = summary.num_images
    skipped = []
    if summary.num_vanished:
        cause = "they were deleted before they were read" if noun == "image" else "they came too fast"
        skipped.append(f"{summary.num_vanished} {noun}s were skipped because {cause}.")
    if summary.num_unreadable:
        skipped.append(
            f"{_count(summary.num_unreadable, 'image')} could not be read; the column 'error' of {predictions} says "
            "why. Replace or remove such images; the next run tries them again."
        )
    if num_images == 0:
        if not summary.num_before:
            return [f"No {noun} could be read, so nothing was predicted.", *skipped]
        return [f"No new {noun}s: all {summary.num_before} are in {predictions}.", *skipped]
    num_rows = summary.num_before + num_images + summary.num_unreadable
    lines = [f"{predictions} has {num_rows} rows, {num_images} of them new.", *skipped]
    if summary.num_dropped:
        lines.append(
            f"{summary.num_dropped} {noun}s were processed again, because the state had been saved before them; "
            f"the previous table is {predictions}.before."
        )
    speed = num_images / summary.seconds
    lines.append(f"{summary.method}: mean confidence {summary.confidence:.3f}, {speed:.1f} {noun}s/s.")
    lines += _describe_normalization(summary.normalization)
    if summary.num_changed is not None:
        percentage = 100 * summary.num_changed / num_images
        verb = "differs" if summary.num_changed == 1 else "differ"
        changed = f"{_count(summary.num_changed, 'prediction')} ({percentage:.1f} %)"
        lines.append(f"{changed} {verb} from those without adaptation.")
    elif summary.changed is not None:
        lines.append(f"{100 * summary.changed:.1f} % of the pixels differ from those without adaptation.")
    if noun == "image":
        lines.append(ORDER_LINES[summary.order])
    if clip is not None:
        lines.append(f"{clip} shows the answers on the frames.")
    if summary.events is None:
        reason = "" if asked_for_guard is False else ", because the state was made without one, or processes share it"
        lines.append(f"Guard: off{reason}.")
    else:
        events = ", ".join(f"{kind} {count}" for kind, count in summary.events.items() if kind != "load")
        lines.append(f"Guard: {events}; see {audit_path(predictions)}." if events else "Guard: no events.")
        if summary.num_by_source:
            lines.append(
                f"Guard: {summary.num_by_source} {noun}s ({100 * summary.num_by_source / num_images:.1f} %) were "
                "answered by the network without adaptation."
            )
    if summary.estimated_gain is not None:
        low, high = summary.estimated_gain_low or 0.0, summary.estimated_gain_high or 0.0
        half = 50 * (high - low)
        lines.append(
            f"Adapting: {100 * summary.estimated_gain:+.1f} ± {half:.1f} points of accuracy over the network without "
            "adaptation, estimated without labels over the last batches."
        )
    if summary.num_skipped:
        lines.append(f"{summary.num_skipped} updates were skipped because they were not finite: try a lower lr.")
    return [*lines, describe_state(state)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _describe_normalization(found: Sequence[NormalizedBatches]) -> list[str]:
    """Return sentences on how batches of each size were normalized."""
    lines = []
    for batches in found:
        is_only = sum(other.batch_size == batches.batch_size for other in found) == 1
        count = "Batches" if is_only else f"{batches.num_batches} batch{'es' * (batches.num_batches > 1)}"
        images = _count(batches.batch_size, "image")
        share = 100 * batches.batch_stats
        kind = "batch" if share == 100 else f"{share:.0f} % batch and {100 - share:.0f} % source"
        lines.append(f"{count} of {images}: normalized with {kind} statistics.")
    return lines


def audit_path(predictions: Path) -> Path:
    """Return the file for the events of the guard, next to the table."""
    return predictions.parent / f"{predictions.stem}.audit.jsonl"


def describe_state(state: Path | None) -> str:
    """Return a sentence on where the adapted model is."""
    if state is None:
        return "The adapted model was not saved; use --state FILE to be able to resume."
    return f"The adapted model is saved in {state}; run the same command again to resume or to process new images."
