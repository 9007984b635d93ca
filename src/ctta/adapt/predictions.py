"""A table of predictions that grows batch by batch and can be cut back to a saved state.

Every row contains the number of the step that predicted it, which a saved state counts as well. So the state alone
determines which rows belong to it: no third file has to agree with the two, and they are written one after the other.
"""

import csv
import io
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ctta.errors import ConfigError, DataError
from ctta.io.atomic import atomic_write, fsync_file

IMAGE, STEP, CHANGED, ERROR, SHARE = "image", "batch", "changed", "error", "share "

#: A spreadsheet runs a cell that starts with one of these as a formula.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_ESCAPE = "'"
_STEP_PATTERN = re.compile("[0-9]{1,18}")


class Predictions(NamedTuple):
    """Answers to a batch.

    Attributes:
        classes: Class of each image; that of most pixels if the network answers per pixel.
        confidences: Its probability; the mean over the pixels.
        label_maps: Class of each pixel (N, H, W), if the network answers per pixel.
    """

    classes: list[int]
    confidences: list[float]
    label_maps: Tensor | None = None


class PredictionFile:
    """A CSV file whose first two columns are the image and the step that predicted it.

    An image that could not be read has a row as well, with the step of its batch and, in a last column ``error``, the
    reason.

    Args:
        path: Path of the file.
        columns: Names of the columns after the first two; ``error`` is the last one, if at all.
        escape_formulas: Whether to write an apostrophe before text that a spreadsheet would run as a formula.
        key: Name of the first column.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, escape_formulas: bool = False, key: str = IMAGE) -> None:
        self.path, self.columns, self.escape_formulas = path, [key, STEP, *columns], escape_formulas

    def create(self) -> None:
        """Write a file with a header and no rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replace([self.columns])

    def is_without_rows(self) -> bool:
        """Return whether the file has a header of this library and nothing else, as after a failed start."""
        lines = self.path.read_bytes().splitlines()
        return len(lines) == 1 and lines[0].startswith(f"{self.columns[0]},{STEP},".encode())

    def truncate(self, step: int, images: Collection[str] = ()) -> tuple[set[str], int]:
        """Drop the rows of this step and later ones, after copying the file to :attr:`backup_path`.

        The names of the images that exist tell whether the file was written with another way of escaping. Return the
        images of the remaining rows, and the number of dropped predictions.
        """
        rows, is_torn = self._read()
        self._check_escaping([row[0] for row in rows], images)
        kept = [row for row in rows if int(row[1]) < step]
        num_dropped = sum(not self._get_error(row) for row in rows) - sum(not self._get_error(row) for row in kept)
        if is_torn or num_dropped:
            # A copy, because if the wrong state was given these rows are finished work.
            shutil.copyfile(self.path, self.backup_path)
        if is_torn or len(kept) < len(rows):
            self._replace([self.columns, *kept])
        return {self._get_image(row) for row in kept}, num_dropped

    def drop_errors(self, is_readable: Callable[[str], bool]) -> tuple[set[str], int]:
        """Drop the rows of images that could not be read and can be now; return these, and how many still cannot."""
        rows, _ = self._read()
        failed = {self._get_image(row) for row in rows if self._get_error(row)}
        readable = {name for name in failed if is_readable(name)}
        if readable:
            self._replace([self.columns, *(row for row in rows if self._get_image(row) not in readable)])
        return readable, len(failed) - len(readable)

    def read_rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows whose first column has a value, by the names of the columns."""
        rows, _ = self._read()
        return [dict(zip(self.columns, row, strict=True)) for row in rows if self._get_image(row) == name]

    @property
    def backup_path(self) -> Path:
        """Path of the copy that is made before rows are dropped."""
        return self.path.with_name(f"{self.path.name}.before")

    def append(self, rows: Iterable[Sequence[object]]) -> None:
        """Append rows to the file, all of them or none."""
        content = memoryview(format_csv(map(self._escape, rows)).encode("utf-8", "surrogateescape"))
        with self.path.open("ab", buffering=0) as file:
            length = file.tell()
            try:
                while content:
                    content = content[file.write(content) or 0 :]
            except OSError:
                file.truncate(length)  # possible on a full disk as well
                raise

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
        header, *others = rows[: max(len(rows) - is_torn, 0)] or [[]]
        if header != self.columns:
            raise ConfigError(
                f"{self.path} has the columns {','.join(header)}, expected {','.join(self.columns)}: use the same "
                "options as before, or choose another file"
            )
        for number, row in enumerate(others, start=2):
            if len(row) != len(self.columns) or not _STEP_PATTERN.fullmatch(row[1]):
                raise DataError(f"row {number} of {self.path} is not a prediction of this library: choose another file")
        return others, is_torn

    def _get_image(self, row: Sequence[str]) -> str:
        return unescape_formula(row[0]) if self.escape_formulas else row[0]

    def _get_error(self, row: Sequence[str]) -> str:
        return row[-1] if self.columns[-1] == ERROR else ""

    def _check_escaping(self, written: Iterable[str], images: Collection[str]) -> None:
        """Raise if the images of a file were written with another setting of ``escape_formulas``."""
        if self.escape_formulas:
            differs = any(name.startswith(FORMULA_STARTS) for name in written)
        else:
            listed = set(images)  # as an image may itself be called '=a.png with the apostrophe
            differs = any(name not in listed and unescape_formula(name) in listed for name in written)
        if differs:
            before, now = ("without", "with") if self.escape_formulas else ("with", "without")
            raise ConfigError(
                f"{self.path} was written {before} escaped formulas and cannot be continued {now}: use the same "
                "options as before, or choose another file"
            )

    def _escape(self, row: Sequence[object]) -> Sequence[object]:
        if not self.escape_formulas:
            return row
        return [escape_formula(value) if isinstance(value, str) else value for value in row]

    def _replace(self, rows: Iterable[Sequence[object]]) -> None:
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(format_csv(rows).encode("utf-8", "surrogateescape"))


def answer_columns(*, with_names: bool, compare: bool, share_names: Sequence[str] = ()) -> list[str]:
    """Return the columns for the answers of the model and, if they are compared, of the source.

    ``share_names`` are the classes of a network that answers per pixel; each has a column for its share.
    """
    columns = ["class", *(["name"] if with_names else []), "confidence"]
    of_source = [f"source_{column}" for column in columns if compare]
    shares = [f"{SHARE}{name}" for name in share_names]
    return [*columns, *of_source, *([CHANGED] if compare and shares else []), *shares]


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    r"""Return rows as CSV with newlines at the end of lines.

    The csv module quotes line breaks only if they are in its own line terminator, up to Python 3.12 at least. With its
    default terminator it quotes both kinds; a terminator of a single newline would leave a carriage return unquoted.

    >>> format_csv([["a\rb.png", 1]])
    '"a\rb.png",1\n'
    """
    lines = []
    for row in rows:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(row)
        lines.append(text.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines)


def escape_formula(text: str) -> str:
    """Write an apostrophe before text that a spreadsheet would run as a formula; it then shows it as text.

    Text that could be mistaken for escaped text gets one too, so that :func:`unescape_formula` is exact.

    >>> escape_formula("=1+1.png"), escape_formula("'=1+1.png"), escape_formula("a.png")
    ("'=1+1.png", "''=1+1.png", 'a.png')
    """
    return _ESCAPE + text if text.lstrip(_ESCAPE).startswith(FORMULA_STARTS) else text


def unescape_formula(text: str) -> str:
    """Return the text that :func:`escape_formula` was given.

    >>> unescape_formula("'=1+1.png"), unescape_formula("a.png")
    ('=1+1.png', 'a.png')
    """
    is_escaped = text.startswith(_ESCAPE) and text.lstrip(_ESCAPE).startswith(FORMULA_STARTS)
    return text.removeprefix(_ESCAPE) if is_escaped else text
