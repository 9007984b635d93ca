"""A table of predictions on disk that grows batch by batch and can be cut back to what a saved state knows of.

Every row carries the number of the step that predicted it, which a saved state counts too. So the state alone says
which rows are its own, no third file has to agree with the two, and they can be written one after the other.
"""

import csv
import io
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

IMAGE, STEP = "image", "batch"


class PredictionFile:
    """A CSV file whose first two columns are the image and the step that predicted it.

    Args:
        path: of the file.
        columns: that follow the first two.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, [IMAGE, STEP, *columns]

    def begin(self) -> None:
        """A file with a header and nothing else."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replace([self.columns])

    def cut_back_to(self, step: int) -> tuple[set[str], int]:
        """Drop the rows of this step and later ones, keeping a copy; which images are left, and how many not."""
        rows, is_torn = self._read()
        kept = [row for row in rows if int(row[1]) < step]
        if is_torn or len(kept) < len(rows):
            # A copy, because with the wrong state these rows would be somebody's finished work.
            shutil.copyfile(self.path, self.copy)
            self._replace([self.columns, *kept])
        return {row[0] for row in kept}, len(rows) - len(kept)

    @property
    def copy(self) -> Path:
        """Where the file is kept as it was before rows were dropped."""
        return self.path.with_name(f"{self.path.name}.before")

    def append(self, rows: Iterable[Sequence[object]]) -> None:
        """Add rows at the end."""
        with self.path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(_as_text(rows))

    def flush_to_disk(self) -> None:
        """Wait until the rows would survive a power cut."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())

    def _read(self) -> tuple[list[list[str]], bool]:
        """The complete rows, and whether a last one was cut off when the process was killed."""
        text = self.path.read_bytes().decode("utf-8", "surrogateescape")
        rows = list(csv.reader(io.StringIO(text, newline="")))
        is_torn = not text.endswith("\n") or len(rows[-1]) != len(self.columns)
        header, *others = rows[: len(rows) - is_torn] or [[]]
        if header != self.columns:
            raise ValueError(
                f"{self.path} has the columns {','.join(header)}, and this run would write {','.join(self.columns)}: "
                "ask for the same columns as before, or name another file"
            )
        for number, row in enumerate(others, start=2):
            if len(row) != len(self.columns) or not row[1].isdecimal():
                raise ValueError(f"row {number} of {self.path} is none that was written here; name another file")
        return others, is_torn

    def _replace(self, rows: Iterable[Sequence[object]]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(_as_text(rows).encode("utf-8", "surrogateescape"))
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _as_text(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
