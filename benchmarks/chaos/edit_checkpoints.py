"""Edit every field of the headers of saved streams in every way, and load the files.

    python -m benchmarks.chaos.edit_checkpoints [NAME ...]

Each edited file is refused, or its model takes the next step; ``tests/test_checkpoint_edits.py`` tries some of them.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from checkpoint_edits import MODELS, REPLACEMENTS, edit, is_refused, paths_in, save_adapted
from saved_streams import read_file


def try_all(name: str, folder: Path) -> list[str]:
    """Try all edits of one kind of stream, print how many were refused, and return those that failed otherwise."""
    save_adapted(name, folder / "s")
    header, tensors = read_file(folder / "s")
    failures, num_refused, paths, started = [], 0, list(paths_in(header)), time.monotonic()
    for path in paths:
        for replacement in REPLACEMENTS:
            try:
                num_refused += is_refused(edit(header, path, replacement), tensors, path, folder / "edited")
            except Exception as error:
                failures.append(f"{name}: {'.'.join(map(str, path))} = {str(replacement)[:40]}: {error!r:.200}")
    num_edits = len(paths) * len(REPLACEMENTS)
    print(
        f"{name:14}{len(paths):5} fields{num_edits:6} edits{num_refused:6} refused"
        f"{num_edits - num_refused - len(failures):6} took a step{len(failures):4} failed"
        f"{time.monotonic() - started:7.0f} s",
        flush=True,
    )
    return failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        problems = [problem for kind in sys.argv[1:] or MODELS for problem in try_all(kind, Path(name))]
    sys.exit("\n".join(problems) if problems else 0)
