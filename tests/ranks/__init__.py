"""Cases that every rank of a world runs, one after the other in one process, because starting processes takes long.

``python -m ranks FOLDER CASE...``, started on every rank, runs the named cases and writes their outcomes to
``FOLDER/<world size>-<rank>.json``; :mod:`ranks.launch` starts the ranks, and ``test_distributed.py`` reports each case
as a test.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

from ctta.distributed import rank, world_size

#: Every case that was imported, by its name; it is called with the folder that the ranks share.
CASES: dict[str, Callable[[Path], None]] = {}


def case(check: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a case under the name of its function."""
    CASES[check.__name__] = check
    return check


def load_cases() -> dict[str, Callable[[Path], None]]:
    """Return all cases in the order in which they run; the last one kills a rank."""
    modules = [importlib.import_module(f"ranks.{name}").__name__ for name in ("steps", "files", "devices", "failures")]
    # Not in the order of registration, which depends on who imported which module first.
    return dict(sorted(CASES.items(), key=lambda item: modules.index(item[1].__module__)))


def outcomes_path(folder: Path, num_ranks: int, number: int) -> Path:
    """Return the file to which a rank writes the outcomes of its cases."""
    return folder / f"{num_ranks}-{number}.json"


def read_outcomes(path: Path) -> dict[str, str]:
    """Return the tracebacks of the cases that a rank has run, empty for those that passed."""
    outcomes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return outcomes


def write_outcome(folder: Path, name: str, traceback: str = "") -> None:
    """Add the outcome of a case to those of this rank."""
    path = outcomes_path(folder, world_size(), rank())
    path.write_text(json.dumps({**read_outcomes(path), name: traceback}))
