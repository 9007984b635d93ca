"""Read the folder of an evaluation: its description, the records of its batches, and the result."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctta.errors import DataError
from ctta.evaluation.results import BatchRecord, Result

FORMAT = 1


def read_batches(path: Path) -> list[BatchRecord]:
    """Read the records of a file of batches.

    Args:
        path: ``batches.jsonl`` of an evaluation.

    Returns:
        The records; a last line that was cut off when the process was killed is left out.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return []
    *complete, _unfinished = path.read_text().split("\n")
    with _report_damage(path):
        return [BatchRecord.from_json(line) for line in complete]


def read_result(folder: Path) -> Result:
    """Read the result of an evaluation from its folder.

    Args:
        folder: A folder that :func:`ctta.evaluate` has written, or is still writing.

    Returns:
        The result, which may be incomplete.

    Raises:
        DataError: A file is damaged, or was written by an incompatible version.
    """
    about, batches = read_about(folder / "about.json"), read_batches(folder / "batches.jsonl")
    with _report_damage(folder / "about.json"):
        return Result.from_batches(about, batches)


def read_about(path: Path) -> dict[str, Any]:
    """Read the description of an evaluation.

    Args:
        path: ``about.json`` of an evaluation.

    Returns:
        All fields of the result but its batches.

    Raises:
        DataError: The file is damaged, or was written by an incompatible version.
    """
    with _report_damage(path):
        about: dict[str, Any] = json.loads(path.read_text())
        if about.pop("format") != FORMAT:
            raise DataError(f"{path} was written by an incompatible version of ctta: evaluate again")
        return about


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Turn whatever parsing a damaged file raises into a DataError."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is damaged ({reason}): delete its folder and evaluate again") from error
