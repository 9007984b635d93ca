"""Progress of work that itself finds out how much there is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ctta.cli.console import progress_bar


@contextmanager
def progress_of_unknown_total(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar to be told (done, total), which appears when it is first told."""
    with ExitStack() as opened:
        bars: list[Callable[[int], None]] = []

        def tell(done: int, total: int) -> None:
            if not bars:
                bars.append(opened.enter_context(progress_bar(title, total)))
            bars[0](done)

        yield tell
