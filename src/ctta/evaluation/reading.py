"""Read the folder of an evaluation: its description, the records of its batches, and the result."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctta.checkpoint.legacy import RENAMED_SETTINGS
from ctta.errors import DataError
from ctta.evaluation.results import BatchRecord, Result

FORMAT = 1
#: How ctta 0.1 formatted settings, as regular expressions, and how this version does.
LEGACY_TEXTS = (
    (r"\bImageViews\(n=", "ImageViews(num_views="),
    (r", colour=", ", color="),
    (r"\bAdmission\(", "InputSpec("),
    (r"\bThresholds\(margin", "CollapseThresholds(margin"),
    (r", clumping=", ", class_sorting="),
)


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
        All fields of the result but its batches; settings have the names of this version.

    Raises:
        DataError: The file is damaged, or was written by an incompatible version.
    """
    with _report_damage(path):
        about: dict[str, Any] = json.loads(path.read_text())
        if about.pop("format") != FORMAT:
            raise DataError(f"{path} was written by an incompatible version of ctta: evaluate again")
        if about["environment"].get("ctta", "").startswith("0.1."):
            about["settings"] = _upgrade_settings(about["settings"])
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


def _upgrade_settings(settings: dict[str, str]) -> dict[str, str]:
    """Return the settings that ctta 0.1 recorded as this version formats them."""
    names = RENAMED_SETTINGS["guarded"] if "admission" in settings else {}
    upgraded = {}
    for name, text in settings.items():
        for old, new in LEGACY_TEXTS:
            text = re.sub(old, new, text)
        upgraded[names.get(name, name)] = text
    return upgraded
