"""Progress of downloads and unpacking: a bar on a terminal, a line at intervals elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ctta.io.progress import ProgressLines, format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def show_progress(
    title: str, *, enabled: bool, num_bytes: int | None = None, initial: int = 0
) -> Iterator[Callable[[int], object]]:
    """Show the bytes done so far on standard error.

    Args:
        title: Text before the bar.
        enabled: Whether the caller wants to see anything at all.
        num_bytes: Total, where known.
        initial: Bytes that were there before.

    Yields:
        A function to call with each number of bytes done.
    """
    if not enabled:
        yield lambda amount: None
    elif (bar := _make_bar()) is not None:
        with bar as progress:
            task = progress.add_task(title, total=num_bytes, completed=initial)
            yield lambda amount: progress.advance(task, amount)
    else:
        lines, done = ProgressLines(title, format_amount=format_bytes), initial

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            lines.update(done, num_bytes)

        advance(0)
        yield advance


def _make_bar() -> "Progress | None":
    """Return a bar, or None if standard error is no terminal or rich is not installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:  # lines will do
        return None
    columns = (
        TextColumn("{task.description}:", markup=False),
        TaskProgressColumn(),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
