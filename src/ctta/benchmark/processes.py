"""Cells in processes beside this one."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from ctta.benchmark.cell import Cell
from ctta.benchmark.executors import Ending, attempt


class Processes:
    """Each cell in a process of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, tuple[Cell, Any]] = {}

    def start(self, cell: Cell) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_in_child, args=(cell, theirs, os.getpid()), daemon=True)
        # A child ignores Ctrl-C, which is this process's to handle, from its first moment: by inheriting that.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()  # so that the end of the process is the end of the pipe
        self._running[ours] = (cell, process)

    def next_ending(self) -> Ending:
        connection = wait(list(self._running))[0]
        assert isinstance(connection, Connection)
        cell, process = self._running.pop(connection)
        try:
            return Ending(cell, connection.recv())
        except EOFError:
            process.join()
            return Ending(cell, f"its process ended with exit code {process.exitcode}", died=True)
        finally:
            connection.close()

    def stop(self) -> None:
        for _cell, process in self._running.values():
            process.kill()
            process.join()
        self._running.clear()


def _in_child(cell: Cell, connection: Connection, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    problem = attempt(cell)
    with contextlib.suppress(BrokenPipeError):  # the parent has been killed meanwhile
        connection.send(problem)


def _end_with(parent: int) -> None:
    """A child must not go on writing once its parent has been killed, perhaps beside its successor."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
