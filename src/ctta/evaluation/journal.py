"""The folder of an evaluation: how it is written, read, and resumed after a kill.

``about.json`` describes what is evaluated, ``batches.jsonl`` grows by a line per batch, and ``state-<n>.safetensors``
is the model after n batches. When an evaluation resumes, lines after the last state are dropped and computed again.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctta.checkpoint.files import load, save
from ctta.checkpoint.manifest import unserializable_arguments
from ctta.core.model import AdaptiveModel
from ctta.errors import DataError
from ctta.evaluation.results import BatchRecord, Result
from ctta.io.atomic import atomic_write, fsync_file
from ctta.io.provenance import check_same_settings

FORMAT = 1


def read_batches(path: Path) -> list[BatchRecord]:
    """Read ``batches.jsonl``; a last line that was cut off when the process was killed is left out."""
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
    """Read ``about.json``: all fields of a result but its batches."""
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


MAX_SAVING_FRACTION = 0.05  # of the time


class SaveSchedule:
    """Decides when the next save is due: every ``interval`` seconds, and less often where saving is slow."""

    def __init__(self, interval: float) -> None:
        self.interval, self._wait, self._saved_at = interval, interval, time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved_at >= self._wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the save within the block takes."""
        started = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        duration = self._saved_at - started
        self._wait = max(self.interval, duration / MAX_SAVING_FRACTION) if self.interval else 0.0


class Journal:
    """Records an evaluation in a folder, or resumes the one that is there.

    ``about`` is everything that the result depends on; a folder with anything else is refused.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, save_every: float) -> None:
        self.folder, self.batches, self.schedule = folder, folder / "batches.jsonl", SaveSchedule(save_every)
        folder.mkdir(parents=True, exist_ok=True)
        path, requested = folder / "about.json", json.loads(json.dumps(about))
        if path.exists():
            check_same_settings(folder, read_about(path), requested)
        else:
            _write_text(path, json.dumps({"format": FORMAT, **requested}, indent=1))

    def resume(self, model: AdaptiveModel) -> tuple[AdaptiveModel, list[BatchRecord]]:
        """Return the model as of the last saved state, or as it is if there is none, and the records up to there."""
        records = read_batches(self.batches)
        if len(records) == json.loads((self.folder / "about.json").read_text())["num_batches"]:
            return model, records
        for leftover in self.folder.glob(".*.tmp"):  # from saves that were killed
            leftover.unlink()
        states = self._states()
        # A state without all of its lines, as in a folder that was partly copied, is useless.
        num_done = max((number for number in states if number <= len(records)), default=0)
        if num_done:
            model = load(states[num_done], model.copy_of_source(), **unserializable_arguments(model))
        kept = records[:num_done]
        _write_text(self.batches, "".join(record.to_json() + "\n" for record in kept))
        return model, kept

    def append(self, record: BatchRecord) -> None:
        """Record a batch."""
        with self.batches.open("a") as file:
            file.write(record.to_json() + "\n")

    def save(self, model: AdaptiveModel, num_batches: int) -> None:
        """Save the state after a number of batches, and remove earlier states."""
        with self.schedule.saving():
            fsync_file(self.batches)  # a state on disk without the lines of its batches would be useless
            save(model, self.folder / f"state-{num_batches}.safetensors")
            for number, path in self._states().items():
                if number != num_batches:
                    path.unlink()

    def finish(self) -> None:
        """Remove the saved state of a complete evaluation."""
        for path in self._states().values():
            path.unlink()

    def _states(self) -> dict[int, Path]:
        """Return the saved states by their number of batches."""
        return {int(path.stem.removeprefix("state-")): path for path in self.folder.glob("state-*.safetensors")}


def write_evaluation(folder: Path, about: dict[str, Any], records: Sequence[BatchRecord]) -> None:
    """Write a complete evaluation to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_text(folder / "batches.jsonl", "".join(record.to_json() + "\n" for record in records))
    _write_text(folder / "about.json", json.dumps({"format": FORMAT, **about}, indent=1))


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text)
