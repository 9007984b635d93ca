"""Progress of long work: a line at intervals, or for downloads a bar where there is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

#: No line for short tasks, and not too many for long ones.
SECONDS_BEFORE_FIRST_LINE, SECONDS_BETWEEN_LINES = 10.0, 60.0


def print_line(line: str) -> None:
    """Print a line on standard error, if there is one."""
    if sys.stderr is not None:  # pythonw has none
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class ProgressLines:
    """Prints a line at intervals: how much is done, for how long, and how long it will take."""

    def __init__(
        self,
        title: str,
        *,
        format_amount: Callable[[int], str] = "{:,}".format,
        print_line: Callable[[str], None] = print_line,
    ) -> None:
        self.title, self.format_amount, self.print_line = title, format_amount, print_line
        self.started, self._due = time.monotonic(), SECONDS_BEFORE_FIRST_LINE
        self._first: int | None = None  # what a resumed run had done before

    def update(self, done: int, total: int | None) -> None:
        """Print how much is done if the next line is due; the total is None if nobody knows it."""
        elapsed = time.monotonic() - self.started
        first = self._first = done if self._first is None else self._first
        if elapsed < self._due or total == 0:
            return
        self._due = elapsed + SECONDS_BETWEEN_LINES
        line = f"{self.title}: {self.format_amount(done)}"
        if total is not None:
            line += f" of {self.format_amount(total)} ({100 * done // total} %)"
        line += f" after {format_duration(elapsed)}"
        if total is not None and first < done < total:
            left = elapsed * (total - done) / (done - first)
            line += f", about {format_duration(left)} left"
        self.print_line(line)


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> format_duration(3725)
    '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def format_bytes(number: int) -> str:
    """Return a number of bytes for people to read.

    >>> format_bytes(2_918_471_680), format_bytes(170_498_071), format_bytes(1234)
    ('2.9 GB', '170 MB', '1 kB')
    """
    if number >= 1e9:
        return f"{number / 1e9:.1f} GB"
    return f"{number / 1e6:.0f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


@contextmanager
def show_progress(
    title: str, *, enabled: bool, num_bytes: int | None = None, initial: int = 0
) -> Iterator[Callable[[int], object]]:
    """Show the bytes done so far on standard error, and give a function to call with each number of bytes done.

    ``num_bytes`` is the total, where known; ``initial`` is what was there before.
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
