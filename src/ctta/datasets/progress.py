"""A progress bar for people, and silence for logs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    what: str, *, wanted: bool, unit: str, total: int | None = None, done: int = 0
) -> Iterator[Callable[[int], object]]:
    """Give a function to call with each amount of work done."""
    if not (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda amount: None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to refuse a download
        yield lambda amount: None
        return
    with tqdm(desc=what, total=total, initial=done, unit=unit, unit_scale=True) as bar:
        yield bar.update
