"""What a user sees: text on standard output, progress on standard error, and Ctrl-C that waits for the running step."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ctta.io.progress import ProgressLines

stdout = Console(highlight=False, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_text(text: str) -> None:
    """Print a text on standard output as it is, without breaking its lines."""
    stdout.print(text, soft_wrap=True)


def print_notice(text: str) -> None:
    """Print a text on standard error as it is, without breaking its lines."""
    stderr.print(text, soft_wrap=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, keep: str = "", right: str = "") -> None:
    """Print a table on standard output; where that is not a terminal, as wide as it is, for other programs.

    The texts of the column ``keep`` are not wrapped; the column ``right`` is aligned to the right.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=name == keep, justify="right" if name == right else "left")
    for row in rows:
        table.add_row(*row)
    needed = Measurement.get(stdout, stdout.options.update(max_width=1000), table).maximum
    before = stdout.width
    if not stdout.is_terminal:
        stdout.width = max(needed, before)
    try:
        stdout.print(table)
    finally:
        stdout.width = before


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar if standard error is a terminal, and a line at intervals if it is not.

    Yields a function of how much is done and the total, None if unknown; its first call makes the bar visible.
    """
    if not stderr.is_terminal:
        yield ProgressLines(title, print_line=print_notice).update
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the end of a step, so that no finished work is lost; a second Ctrl-C interrupts at once.

    Yields a function to be called between two steps; after Ctrl-C it raises KeyboardInterrupt.
    """
    interrupted = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def raise_if_interrupted() -> None:
        from ctta.distributed.collectives import all_reduce_any

        # Under torchrun the signal may reach one rank before a step and another after it.
        if all_reduce_any(interrupted):
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield raise_if_interrupted
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


RESUME = "Run the same command again to resume."


@contextmanager
def exit_on_interrupt(advice: str = RESUME) -> Iterator[None]:
    """Turn Ctrl-C into a line of advice and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        after_echo = "\n" if stderr.is_terminal else ""  # a terminal has printed ^C
        print_notice(f"{after_echo}Stopped. {advice}")
        raise typer.Exit(130) from None


@contextmanager
def resumable_progress(
    title: str, advice: str = RESUME
) -> Iterator[tuple[Callable[[int, int | None], None], Callable[[], None]]]:
    """Show the progress of work that resumes when the command is run again, and end it between two steps on Ctrl-C.

    Yields a function to be called after each step with how much is done and the total, and that of
    :func:`interrupt_between_steps` for steps that take long.
    """
    with exit_on_interrupt(advice), progress_bar(title) as update, interrupt_between_steps() as raise_if_interrupted:

        def on_progress(done: int, total: int | None) -> None:
            update(done, total)
            raise_if_interrupted()

        yield on_progress, raise_if_interrupted


@contextmanager
def quiet_except_rank_zero() -> Iterator[None]:
    """Under ``torchrun`` every rank runs the command: let only the first one print."""
    if "torch" not in sys.modules and "RANK" not in os.environ:  # alone, and quick to answer
        yield
        return
    from ctta.distributed import init, rank

    init()
    if rank() == 0:
        yield
        return
    stdout.quiet = stderr.quiet = True
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull):
        yield
