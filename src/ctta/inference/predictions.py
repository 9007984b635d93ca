"""A table of predictions that grows batch by batch and can be cut back to a saved state.

Every row contains the number of the step that predicted it, which a saved state counts as well. So the state alone
determines which rows belong to it: no third file has to agree with the two, and they are written one after the other.
"""

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctta.errors import ConfigError, DataError
from ctta.io.atomic import atomic_write, fsync_file

IMAGE, STEP = "image", "batch"


class PredictionFile:
    """A CSV file whose first two columns are the image and the step that predicted it.

    Args:
        path: Path of the file.
        columns: Names of the columns after the first two.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, [IMAGE, STEP, *columns]

    def create(self) -> None:
        """Write a file with a header and no rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replace([self.columns])

    def truncate(self, step: int) -> tuple[set[str], int]:
        """Drop the rows of this step and later ones, after copying the file to :attr:`backup_path`.

        Returns:
            The images of the remaining rows, and the number of dropped rows.
        """
        rows, is_torn = self._read()
        kept = [row for row in rows if int(row[1]) < step]
        if is_torn or len(kept) < len(rows):
            # A copy, because if the wrong state was given these rows are finished work.
            shutil.copyfile(self.path, self.backup_path)
            self._replace([self.columns, *kept])
        return {row[0] for row in kept}, len(rows) - len(kept)

    @property
    def backup_path(self) -> Path:
        """Path of the copy that is made before rows are dropped."""
        return self.path.with_name(f"{self.path.name}.before")

    def append(self, rows: Iterable[Sequence[object]]) -> None:
        """Append rows to the file."""
        with self.path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(_format_csv(rows))

    def flush_to_disk(self) -> None:
        """Wait until the rows would survive a power cut."""
        fsync_file(self.path)

    def _read(self) -> tuple[list[list[str]], bool]:
        """Return the complete rows, and whether the last one was cut off when the process was killed."""
        text = self.path.read_bytes().decode("utf-8", "surrogateescape")
        try:
            rows = list(csv.reader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise DataError(f"{self.path} is not a table of predictions ({error}): choose another file") from error
        is_torn = not text.endswith("\n") or len(rows[-1]) != len(self.columns)
        header, *others = rows[: len(rows) - is_torn] or [[]]
        if header != self.columns:
            raise ConfigError(
                f"{self.path} has the columns {','.join(header)}, expected {','.join(self.columns)}: use the same "
                "options as before, or choose another file"
            )
        for number, row in enumerate(others, start=2):
            if len(row) != len(self.columns) or not row[1].isdecimal():
                raise DataError(f"row {number} of {self.path} is not a prediction of this library: choose another file")
        return others, is_torn

    def _replace(self, rows: Iterable[Sequence[object]]) -> None:
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(_format_csv(rows).encode("utf-8", "surrogateescape"))


def _format_csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
