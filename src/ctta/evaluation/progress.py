"""Progress of an evaluation on standard error: one line that changes on a terminal, a line at intervals elsewhere."""

import sys
import time
from typing import TextIO

from ctta.evaluation.metrics import UnlabeledScore
from ctta.evaluation.results import BatchRecord

ERASE_TO_END = "\x1b[K"
TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 10.0  # seconds between two lines


class ProgressLine:
    """Shows how far an evaluation is; call it with the record of each batch.

    Args:
        name: What is evaluated.
        num_batches: Number of batches in all, if known.
        file: Where to write; standard error by default.
    """

    def __init__(self, name: str, num_batches: int | None, file: TextIO | None = None) -> None:
        self.name, self.num_batches, self.file = name, num_batches, file or sys.stderr
        self.num_done, self._values, self._text = 0, 0.0, ""
        self._is_terminal = self.file.isatty()
        self._shown_at = time.monotonic()

    def __call__(self, record: BatchRecord) -> None:
        """Count a batch, and show it if it is time."""
        self.num_done += 1
        score = record.score
        self._values += score.confidence if isinstance(score, UnlabeledScore) else score.error
        what = "confidence" if isinstance(score, UnlabeledScore) else "error"
        total = "" if self.num_batches is None else f" of {self.num_batches}"
        value = f"{what} {100 * self._values / self.num_done:.1f} %"
        self._text = f"{self.name}: {self.num_done}{total} batches, {value}"
        interval = TERMINAL_INTERVAL if self._is_terminal else LOG_INTERVAL
        if self.num_done == self.num_batches:
            self.finish()
        elif time.monotonic() - self._shown_at >= interval:
            self._show(is_last=False)

    def finish(self) -> None:
        """Show the last batch, unless it has been shown."""
        if self._text:
            self._show(is_last=True)
            self._text = ""

    def _show(self, *, is_last: bool) -> None:
        # What is left of a longer line, which may be another method's, is erased.
        before, after = ("\r", ERASE_TO_END + "\n" * is_last) if self._is_terminal else ("", "\n")
        self.file.write(f"{before}{self._text}{after}")
        self.file.flush()
        self._shown_at = time.monotonic()
