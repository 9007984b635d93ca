"""Files that are complete or absent, and folders that are of one origin."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ORIGIN = "made_from.json"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a partial file to write to, which becomes `path` when the block ends without an error.

    Its name is fixed, so a run started again after being killed overwrites what that one left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def same_origin(folder: Path, **origin: str | int) -> None:
    """Record what a folder is made from, or refuse to go on with one that is made from something else."""
    path = folder / ORIGIN
    if not path.exists():
        with replacing(path) as partial:
            partial.write_text(json.dumps(origin, indent=1) + "\n")
        return
    found = json.loads(path.read_text())
    different = sorted(key for key in origin.keys() | found.keys() if origin.get(key) != found.get(key))
    if different:
        raise ValueError(
            f"{folder} was made with another {' and '.join(different)} ({found}, now {origin}); "
            "write to another folder, or delete this one"
        )
