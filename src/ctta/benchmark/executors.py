"""Where cells run: the protocol of an executor, and those of this machine."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ctta.benchmark.cells import BenchmarkCell
from ctta.errors import is_user_error
from ctta.evaluation.results import BatchRecord

logger = logging.getLogger("ctta.benchmark")

WORKER = "ctta.benchmark.worker"


@dataclass(frozen=True)
class JobOutcome:
    """How an attempt to run a cell ended.

    Attributes:
        cell: The cell.
        error: What went wrong, in one line; None if the result is complete.
        process_died: Whether the process ended without reporting, which another attempt may survive.
        will_retry: Whether the cell is run again.
    """

    cell: BenchmarkCell
    error: str | None = None
    process_died: bool = False
    will_retry: bool = False


class Executor(Protocol):
    """Runs cells, several at a time.

    Attributes:
        num_slots: How many cells can run at the same time.
    """

    num_slots: int

    def submit(self, cell: BenchmarkCell) -> None:
        """Start a cell.

        Args:
            cell: The cell; there must be a free slot.
        """

    def next_outcome(self) -> JobOutcome:
        """Wait until one of the submitted cells has ended, and return its outcome."""

    def shutdown(self) -> None:
        """Stop all running cells; what they have written stays."""


def run_cell(cell: BenchmarkCell, on_batch: Callable[[BatchRecord], None] | None = None) -> str | None:
    """Run a cell in this process.

    The traceback of an error that is not the user's mistake is logged.

    Args:
        cell: The cell.
        on_batch: Called after each batch.

    Returns:
        The error in one line, or None.
    """
    try:
        cell.run(on_batch)
    except Exception as error:  # whatever it is, it is reported and the other cells continue
        if not is_user_error(error):
            logger.exception("cell %s failed", cell.name)
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class SerialExecutor:
    """Runs one cell after the other in this process.

    Args:
        on_batch: Called after each batch; where it raises KeyboardInterrupt, the cell is saved first.
    """

    num_slots = 1

    def __init__(self, on_batch: Callable[[BatchRecord], None] | None = None) -> None:
        self.on_batch = on_batch

    def submit(self, cell: BenchmarkCell) -> None:
        """Note the cell to run.

        Args:
            cell: The cell.
        """
        self._cell = cell

    def next_outcome(self) -> JobOutcome:
        """Run the submitted cell and return its outcome."""
        return JobOutcome(self._cell, run_cell(self._cell, self.on_batch))

    def shutdown(self) -> None:
        """Do nothing: no cell is running."""


class ProcessExecutor:
    """Runs each cell in a separate process on this machine.

    Unlike :mod:`multiprocessing`, a worker does not import the caller's main module, so that scripts and notebooks need
    no ``if __name__ == "__main__"``, and it is given its cell as an argument, so that it ends quietly if this process
    is killed at any moment.

    Args:
        num_slots: How many processes run at the same time.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._running: dict[BenchmarkCell, tuple[subprocess.Popen[bytes], threading.Thread]] = {}
        self._outcomes: SimpleQueue[JobOutcome] = SimpleQueue()

    def submit(self, cell: BenchmarkCell) -> None:
        """Start the process of a cell.

        Args:
            cell: The cell; there must be a free slot.
        """
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, cell.to_json()],
            stdin=subprocess.PIPE,  # never written to: a worker exits when this pipe closes, as this process has ended
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search_path},
            # Ctrl-C is for this process to handle.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        thread = threading.Thread(target=self._collect, args=(cell, process), daemon=True)
        self._running[cell] = process, thread
        thread.start()

    def _collect(self, cell: BenchmarkCell, process: subprocess.Popen[bytes]) -> None:
        """Wait for a worker's report."""
        with process:
            assert process.stdout is not None
            report = process.stdout.read()
        try:
            outcome = JobOutcome(cell, json.loads(report)["error"])
        except ValueError:  # no report, or half of one
            outcome = JobOutcome(cell, f"its process ended with exit code {process.returncode}", process_died=True)
        self._outcomes.put(outcome)

    def next_outcome(self) -> JobOutcome:
        """Wait until one of the processes has ended, and return its outcome."""
        outcome = self._outcomes.get()
        del self._running[outcome.cell]
        return outcome

    def shutdown(self) -> None:
        """Kill all running processes; what they have written stays."""
        for process, thread in self._running.values():
            process.kill()
            thread.join()
        self._running.clear()
