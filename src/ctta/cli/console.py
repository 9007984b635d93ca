"""What a person sees: text on standard output, progress on standard error if that is a terminal."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar to be told how much is done; nothing is shown where nobody watches."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def progress_of(title: str, total: int, measure: Callable[[], int]) -> Iterator[None]:
    """A bar that asks now and then how much is done, for work that goes on elsewhere."""
    ended = threading.Event()
    with progress_bar(title, total) as advance:

        def watch() -> None:
            while not ended.wait(0.3):
                advance(measure())

        watcher = threading.Thread(target=watch, daemon=True)
        if err.is_terminal:
            watcher.start()
        try:
            yield
        finally:
            ended.set()
            if watcher.is_alive():
                watcher.join()
