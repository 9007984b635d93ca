"""The settings that a folder was made with: recorded by the first run, compared by every run that continues it."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write


def record_settings(path: str | PathLike[str], settings: Mapping[str, Any]) -> None:
    """Write settings to a JSON file, or check that the file holds the same ones.

    Args:
        path: The file; its folder is created if needed.
        settings: Values that JSON can hold.

    Raises:
        ConfigError: The file holds other settings.
    """
    path = Path(path)
    if path.exists():
        check_same_settings(path.parent, json.loads(path.read_text()), settings)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(settings, indent=1) + "\n")


def check_same_settings(
    folder: str | PathLike[str],
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    hint: str = "use another folder, or delete this one",
) -> None:
    """Check that a folder is continued with the settings that it was made with.

    Args:
        folder: The folder, for the error message.
        recorded: The settings of the earlier run.
        current: The settings of this run.
        hint: What the caller can do about a difference.

    Raises:
        ConfigError: The settings differ; the message names those that do.
    """
    different = sorted(key for key in recorded.keys() | current.keys() if recorded.get(key) != current.get(key))
    if different:
        changes = "; ".join(f"{key}: {recorded.get(key)!r}, now {current.get(key)!r}" for key in different)
        raise ConfigError(f"{folder} was made with a different {' and '.join(different)} ({changes}): {hint}")
