"""Progress bar of downloads and unpacking, shared by both; silent where standard error is not a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    title: str, *, enabled: bool, num_bytes: int | None = None, initial: int = 0
) -> Iterator[Callable[[int], object]]:
    """Show the bytes done so far on standard error, if that is a terminal and rich is installed.

    Args:
        title: Text before the bar.
        enabled: Whether the caller wants a bar at all.
        num_bytes: Total, where known.
        initial: Bytes that were there before.

    Yields:
        A function to call with each number of bytes done.
    """
    if not (enabled and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda amount: None
        return
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
    except ImportError:  # a download works without a bar
        yield lambda amount: None
        return
    columns = (
        TextColumn("{task.description}:", markup=False),
        TaskProgressColumn(),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=num_bytes, completed=initial)
        yield lambda amount: progress.advance(task, amount)
