"""The settings that a folder was made with, so that outputs of different settings never mix."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctta.errors import ConfigError, DataError
from ctta.io.atomic import atomic_write

HINT = "use another folder or delete this one"


def record_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings to a JSON file, or check that the file holds the same ones.

    Raises:
        ConfigError: The file holds other settings, or settings with other names.
        DataError: The file is damaged.
    """
    if path.exists():
        recorded = read_settings(path)
        check_same_settings(path.parent, recorded, {**dict.fromkeys(recorded), **settings})
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(settings, indent=1) + "\n")


def read_settings(path: Path, *, hint: str = HINT) -> dict[str, Any]:
    """Return the settings of a file that was written by :func:`record_settings`.

    Raises:
        DataError: The file does not hold a JSON object; ``hint`` says what to do.
    """
    try:
        recorded = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise DataError(_describe_damage(path, str(error), hint)) from error
    if not isinstance(recorded, dict):
        raise DataError(_describe_damage(path, f"expected an object, found a {type(recorded).__name__}", hint))
    return recorded


def _describe_damage(path: Path, reason: str, hint: str) -> str:
    return f"{path}, which records what the folder was made with, is damaged ({reason}): {hint}"


def check_same_settings(
    path: Path, recorded: Mapping[str, Any], requested: Mapping[str, Any], *, hint: str = HINT
) -> None:
    """Refuse to continue with outputs that were made with other settings.

    Nested mappings are compared key by key. Recorded settings that are not requested do not matter.

    Raises:
        ConfigError: A requested setting differs from the recorded one; the message lists all differences.

    >>> check_same_settings(Path("runs/a"), {"seed": 1, "threads": 2}, {"seed": 1, "threads": 4})
    Traceback (most recent call last):
    ctta.errors.ConfigError: runs/a was made with other settings (threads: 2 → 4): use another folder or delete this one
    """
    if differences := list(_differences(recorded, requested)):
        raise ConfigError(f"{path} was made with other settings ({'; '.join(differences)}): {hint}")


def _differences(recorded: Mapping[str, Any], requested: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every difference as ``name: recorded → requested``."""
    for name, now in requested.items():
        before = recorded.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            # A key that only one side has counts as a difference: for example, settings of another class.
            everything = dict.fromkeys([*before, *now])
            yield from _differences(before, {key: now.get(key) for key in everything}, prefix=f"{prefix}{name}.")
        elif name not in recorded or before != now:
            yield f"{prefix}{name}: {_format(before, name in recorded)} → {_format(now, True)}"


def _format(value: Any, is_known: bool) -> str:
    return "nothing" if not is_known or value is None else str(value)
