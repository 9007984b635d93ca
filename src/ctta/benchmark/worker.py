"""The process of one cell: ``python -m ctta.benchmark.worker CELL``, started by ``ProcessExecutor``.

CELL is JSON. The report, one JSON object, goes to standard output.
"""

import contextlib
import json
import os
import sys
import threading

from ctta.benchmark.cells import BenchmarkCell
from ctta.benchmark.executors import run_cell


def main() -> None:
    """Run the cell that the command line describes and report how it ended."""
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


if __name__ == "__main__":
    main()
