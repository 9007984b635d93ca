"""Streams on disk: one folder each, replaced as a whole, so that it can be read whenever the process is killed."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ctta.checkpoint.files import save
from ctta.errors import CheckpointError
from ctta.io.atomic import fsync_directory, fsync_file
from ctta.serve.names import folder_of, name_of
from ctta.serve.stream import ServedStream

STATE, WINDOW = "state.safetensors", "window.safetensors"
_UNFINISHED = "unfinished-"
_DELETED = ".deleted-"  # no stream's folder begins with a dot
_DAMAGED = ".damaged-"


class Snapshots:
    """The folder of all streams: ``<stream>/<number>/``, of which the highest number counts.

    A snapshot is written beside its predecessor under another name, flushed, and renamed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (f"*/{_UNFINISHED}*", f"{_DELETED}*"):
            for leftover in list(folder.glob(pattern)):  # of a process that was killed
                shutil.rmtree(leftover)

    def names(self) -> Iterator[str]:
        """Every stream that has a snapshot."""
        for path in sorted(self.folder.iterdir()):
            if (name := name_of(path.name)) and self._numbers(path):
                yield name

    def write(self, stream: ServedStream) -> None:
        """Replace the stream's snapshot by one of now."""
        place = self.folder / folder_of(stream.name)
        place.mkdir(exist_ok=True)
        number = max(self._numbers(place), default=0) + 1
        unfinished = place / f"{_UNFINISHED}{number}"
        shutil.rmtree(unfinished, ignore_errors=True)  # of a save that failed
        unfinished.mkdir()
        save(stream.model, unfinished / STATE)
        window = {} if stream.window.images is None else {"images": stream.window.images}
        text = json.dumps({"since_update": stream.window.num_since_update, "summary": stream.summary()})
        save_file(window, unfinished / WINDOW, metadata={"stream": text})
        fsync_file(unfinished / WINDOW)
        fsync_directory(unfinished)
        os.rename(unfinished, place / str(number))
        fsync_directory(place)
        fsync_directory(self.folder)
        for older in self._numbers(place) - {number}:
            shutil.rmtree(place / str(older))

    def state_file(self, name: str) -> Path:
        """The file that :func:`ctta.load` reads."""
        return self._newest(name) / STATE

    def summary(self, name: str) -> dict[str, Any]:
        """What the stream told of itself when it was written."""
        described: dict[str, Any] = self._described(name)["summary"]
        return described

    def restore(self, stream: ServedStream) -> None:
        """Give a stream whose model was loaded its window and its counts."""
        described = self._described(stream.name)
        stream.restore(described["summary"])
        stream.window.num_since_update = int(described["since_update"])
        stream.window.images = load_file(self._newest(stream.name) / WINDOW).get("images")

    def delete(self, name: str) -> None:
        """Forget a stream; no harm where there is none."""
        place, deleted = (self.folder / f"{prefix}{folder_of(name)}" for prefix in ("", _DELETED))
        shutil.rmtree(deleted, ignore_errors=True)
        if place.exists():
            os.rename(place, deleted)  # as a whole, so that a kill leaves no half of it that looks like a stream
            shutil.rmtree(deleted, ignore_errors=True)
            fsync_directory(self.folder)

    def set_aside(self, name: str) -> Path:
        """Put a stream that cannot be read where nobody looks for it, and where a person can."""
        place = self.folder / f"{_DAMAGED}{time.time_ns()}-{folder_of(name)}"
        os.rename(self.folder / folder_of(name), place)
        fsync_directory(self.folder)
        return place

    def _described(self, name: str) -> dict[str, Any]:
        try:
            with safe_open(self._newest(name) / WINDOW, framework="pt") as file:
                described: dict[str, Any] = json.loads((file.metadata() or {})["stream"])
        except (SafetensorError, FileNotFoundError, KeyError, ValueError) as error:  # not a disk that fails for a while
            raise CheckpointError(f"{self._newest(name)} cannot be read ({error})") from error
        return described

    def _newest(self, name: str) -> Path:
        place = self.folder / folder_of(name)
        return place / str(max(self._numbers(place)))

    @staticmethod
    def _numbers(place: Path) -> set[int]:
        return {int(path.name) for path in place.iterdir() if path.name.isdecimal()} if place.is_dir() else set()
