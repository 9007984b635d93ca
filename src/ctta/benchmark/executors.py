"""Where cells run, and how: in this process, in others of this machine, or on a Ray cluster; retries and progress."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from ctta.benchmark.plan import BenchmarkCell, BenchmarkRun
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError, is_user_error
from ctta.evaluation.results import BatchRecord

logger = logging.getLogger("ctta.benchmark")

#: The program of the process of one cell, which is its argument, as JSON.
WORKER = "from ctta.benchmark.executors import run_worker; run_worker()"


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
    """Run a cell in this process; return the error in one line, or None.

    The traceback of an error that is not the user's mistake is logged.
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
            cell: The cell.
        """
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, cell.to_json()],
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


def run_worker() -> None:
    """Run the cell that the command line describes, and report how it ended as a JSON object on standard output."""
    parent, report = os.dup(0), os.dup(1)
    # Whatever a network reads or prints must not mix with the two pipes.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    error = run_cell(BenchmarkCell.from_json(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError), open(report, "w") as file:
        json.dump({"error": error}, file)


def _exit_with_parent(pipe: int) -> None:
    """Exit when the parent ends: its successor may write to the same folder."""
    os.read(pipe, 1)
    os._exit(1)


class RayExecutor:
    """Runs each cell as a Ray task.

    Args:
        address: Address of a running cluster, ``"auto"`` to find one, None to start one on this machine.
        threads: CPU threads per cell, which Ray counts as CPUs.
        device: Device of the networks; a cell on CUDA gets a GPU of its own.

    Raises:
        ConfigError: No node of the cluster has enough CPUs or a GPU.
    """

    def __init__(self, address: str | None, threads: int, device: str = "cpu") -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("benchmarks on a cluster need the extra 'ray': pip install 'ctta[ray]'") from error
        self._ray: Any = ray
        self._ray.init(
            address=address,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        needs = {"CPU": threads, "GPU": int(device.startswith("cuda"))}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        slots = [min(int(node.get(kind, 0) // count) for kind, count in needs.items() if count) for node in nodes]
        self.num_slots = sum(slots)
        if self.num_slots == 0:
            self._ray.shutdown()
            raise ConfigError(f"each cell needs {needs}, which no node of the cluster has: use fewer threads")
        # Retries are those of ctta.benchmark.execute, as with every executor, so that each one is reported.
        self._task = self._ray.remote(num_cpus=threads, num_gpus=needs["GPU"], max_retries=0)(run_cell)
        self._running: dict[Any, BenchmarkCell] = {}

    def submit(self, cell: BenchmarkCell) -> None:
        """Start the task of a cell.

        Args:
            cell: The cell.
        """
        self._running[self._task.remote(cell)] = cell

    def next_outcome(self) -> JobOutcome:
        """Wait until one of the tasks has ended, and return its outcome."""
        (done,), _ = self._ray.wait(list(self._running), num_returns=1)
        cell = self._running.pop(done)
        try:
            return JobOutcome(cell, self._ray.get(done))
        except self._ray.exceptions.RayError as error:
            return JobOutcome(cell, str(error).splitlines()[0], process_died=True)

    def shutdown(self) -> None:
        """Cancel all running tasks and disconnect from the cluster."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()


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
    """Counts the batches done in the files of the cells, wherever the cells are running."""

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
    """Call a function with the number of batches done and in total, from another thread, within the block."""
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
