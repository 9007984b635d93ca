"""Execute the cells of a run, retry those whose process died, and count the batches done."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ctta.benchmark.executors import Executor, JobOutcome
from ctta.benchmark.plan import BenchmarkRun
from ctta.distributed.collectives import run_on_rank_zero

MAX_ATTEMPTS = 3
SECONDS_BETWEEN_REPORTS = 0.3


def execute(
    run: BenchmarkRun, executor: Executor, *, on_outcome: Callable[[JobOutcome], None] | None = None
) -> list[JobOutcome]:
    """Run every cell that is not complete.

    A cell whose process died is tried again, up to three times in all; whatever fails, the other cells continue.

    Args:
        run: The run.
        executor: Runs the cells; it is shut down at the end.
        on_outcome: Called after every attempt to run a cell.

    Returns:
        The outcomes of the cells that failed for good.
    """
    complete = run_on_rank_zero(lambda: [cell.is_complete for cell in run.cells])
    waiting = [cell for cell, is_complete in zip(run.cells, complete, strict=True) if not is_complete]
    num_attempts = dict.fromkeys(waiting, 0)
    failures: list[JobOutcome] = []
    num_running = 0
    try:
        while waiting or num_running:
            while waiting and num_running < executor.num_slots:
                cell = waiting.pop(0)
                num_attempts[cell] += 1
                executor.submit(cell)
                num_running += 1
            outcome = executor.next_outcome()
            num_running -= 1
            if outcome.process_died and num_attempts[outcome.cell] < MAX_ATTEMPTS:
                outcome = replace(outcome, will_retry=True)
                waiting.append(outcome.cell)
            elif outcome.error:
                failures.append(outcome)
            if on_outcome:
                on_outcome(outcome)
    finally:
        executor.shutdown()
    return failures


class ProgressCounter:
    """Counts the batches done in the files of the cells, wherever the cells are running.

    Args:
        run: The run.
    """

    def __init__(self, run: BenchmarkRun) -> None:
        self.files = [Path(cell.folder) / "batches.jsonl" for cell in run.cells]
        self._counted: dict[Path, tuple[int, int]] = {}  # the bytes of a file that were read, and their lines

    def count(self) -> int:
        """Return the number of batches done in all cells."""
        for path in self.files:
            size = path.stat().st_size if path.exists() else 0
            num_read, num_lines = self._counted.get(path, (0, 0))
            if size < num_read:  # a resumed cell has truncated the file to its last state
                num_read, num_lines = 0, 0
            if size > num_read:
                with path.open("rb") as file:
                    file.seek(num_read)
                    num_lines += file.read(size - num_read).count(b"\n")
            self._counted[path] = (size, num_lines)
        return sum(num_lines for _size, num_lines in self._counted.values())


@contextmanager
def report_progress(run: BenchmarkRun, on_progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Call a function with the number of batches done and in total, from another thread, within the block.

    Args:
        run: The run.
        on_progress: The function; None for nothing.

    Yields:
        Nothing.
    """
    if on_progress is None:
        yield
        return
    counter, ended = ProgressCounter(run), threading.Event()

    def watch() -> None:
        while True:
            on_progress(counter.count(), run.num_batches)
            if ended.wait(SECONDS_BETWEEN_REPORTS):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    on_progress(counter.count(), run.num_batches)
