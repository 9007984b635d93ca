"""The folder of an evaluation: what was asked, a line per batch, and from time to time the state to go on from.

``about.json`` says what is evaluated, ``batches.jsonl`` grows by a line per batch, and ``state-<n>.safetensors`` is the
model after n batches. Killed at any moment, all lines after the last state are dropped and computed again.
"""

import json
import os
from pathlib import Path
from typing import Any

from ctta.base import AdaptiveModel
from ctta.checkpoint.files import load, save
from ctta.checkpoint.manifest import unserializable_arguments
from ctta.evaluation.pace import SavingPace
from ctta.evaluation.results import FORMAT, BatchRecord, read_batches


class Journal:
    """Keeps an evaluation in a folder, or goes on with one.

    Args:
        folder: made if it is not there.
        about: all that the outcome depends on; a folder with anything else is refused.
        save_every: seconds between two states, more where saving one takes long; 0 after every batch.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, save_every: float) -> None:
        self.folder, self.batches, self.pace = folder, folder / "batches.jsonl", SavingPace(save_every)
        folder.mkdir(parents=True, exist_ok=True)
        self._check_same(json.loads(json.dumps({"format": FORMAT, **about})))

    def _check_same(self, about: dict[str, Any]) -> None:
        path = self.folder / "about.json"
        if not path.exists():
            write_atomically(path, json.dumps(about, indent=1))
            return
        there = json.loads(path.read_text())
        if different := [key for key in about if about[key] != there.get(key)]:
            raise ValueError(
                f"{self.folder} holds an evaluation with another {', '.join(different)} "
                f"({there.get(different[0])!r}, now {about[different[0]]!r}): give another folder, or delete that one"
            )

    def resume(self, model: AdaptiveModel) -> tuple[AdaptiveModel, list[BatchRecord]]:
        """The model as far as the folder has it, and the records up to there."""
        records = read_batches(self.batches)
        if len(records) == json.loads((self.folder / "about.json").read_text())["num_batches"]:
            return model, records
        for leftover in self.folder.glob(".*.tmp"):  # of saves that were killed
            leftover.unlink()
        states = self._states()
        # A state may be ahead of its lines where a folder was copied half; it cannot be gone on from.
        place = max((number for number in states if number <= len(records)), default=0)
        if place:
            model = load(states[place], model.copy_of_source(), **unserializable_arguments(model))
        kept = records[:place]
        write_atomically(self.batches, "".join(record.to_json() + "\n" for record in kept))
        return model, kept

    def append(self, record: BatchRecord) -> None:
        """Note a batch."""
        with self.batches.open("a") as file:
            file.write(record.to_json() + "\n")

    def save(self, model: AdaptiveModel, num_batches: int) -> None:
        """Write the state after so many batches."""
        with self.pace.saving():
            with self.batches.open("a") as file:
                os.fsync(file.fileno())  # a state on disk without its batches' lines could not be gone on from
            save(model, self.folder / f"state-{num_batches}.safetensors")
            for number, path in self._states().items():
                if number != num_batches:
                    path.unlink()

    def finish(self) -> None:
        """Drop the state, which nobody needs any more."""
        for path in self._states().values():
            path.unlink()

    def _states(self) -> dict[int, Path]:
        return {int(path.stem.removeprefix("state-")): path for path in self.folder.glob("state-*.safetensors")}


def write_atomically(path: Path, text: str) -> None:
    """All of the text or none, whenever the process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
