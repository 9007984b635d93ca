"""Streams on disk, and the factory that creates them or reads them back."""

import errno
import json
import logging
import os
import re
import shutil
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ctta.checkpoint.encoding import encode, is_serializable
from ctta.checkpoint.files import load, save
from ctta.checkpoint.manifest import nested_models, optimizer_tensors, unserializable_arguments
from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.errors import CheckpointError, DamagedCheckpointError
from ctta.io.atomic import fsync_directory, fsync_file
from ctta.io.tensors import read_tensors, write_tensors
from ctta.nn.surgery import copy_sharing_tensors
from ctta.serve.audit import AuditLog, StreamEvent
from ctta.serve.schemas import STREAM_NAME_PATTERN
from ctta.serve.stream import ServedStream
from ctta.serve.window import SampleWindow, TimeBudget

logger = logging.getLogger("ctta.serve")

STATE_FILE, WINDOW_FILE = "state.safetensors", "window.safetensors"
ANSWERS = "answers."  # what their tensors begin with in the window file
_FORMAT = 2  # of the window file
UNFINISHED = "unfinished-"
DELETED, DAMAGED = ".deleted-", ".damaged-"  # no stream's directory starts with a dot
#: What a summary must have; others came later, or only for the page.
_SUMMARY: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "updates": int,
    "requests": int,
    "images": int,
    "skipped": dict,
    "used_at": (int, float),
    "confidences": list,
    "collapse_scores": list,
    "events": list,
}
_UNESCAPED = string.ascii_lowercase + string.digits + "-"


def directory_name(stream: str) -> str:
    """Return the directory name of a stream, unique on file systems that ignore case too.

    >>> directory_name("Line.7")
    '_4cine_2e7'
    """
    return "".join(letter if letter in _UNESCAPED else f"_{ord(letter):02x}" for letter in stream)


def parse_directory_name(name: str) -> str | None:
    """Return the stream of a directory, or None if it is no stream's.

    >>> parse_directory_name("_4cine_2e7")
    'Line.7'
    """
    stream = re.sub("_([0-9a-f]{2})", lambda code: chr(int(code[1], 16)), name)
    return stream if re.fullmatch(STREAM_NAME_PATTERN, stream) and directory_name(stream) == name else None


class Snapshots:
    """Snapshots of streams as ``<directory>/<stream>/<number>/``, of which the highest number counts.

    A snapshot is written beside its predecessor under another name, flushed and renamed, so that the streams can be
    read whenever the process is killed.

    Args:
        directory: Where the streams are kept; it is created if needed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for pattern in (f"*/{UNFINISHED}*", f"{DELETED}*"):
            for leftover in list(self.directory.glob(pattern)):  # of a process that was killed
                shutil.rmtree(leftover)

    def names(self) -> Iterator[str]:
        """Yield every stream that has a snapshot."""
        for path in sorted(self.directory.iterdir()):
            if (name := parse_directory_name(path.name)) and self._numbers(path):
                yield name

    def write(self, stream: ServedStream) -> None:
        """Replace the snapshot of a stream by its current state; OSError if that fails, and the old one remains."""
        parent = self.directory / directory_name(stream.name)
        parent.mkdir(exist_ok=True)
        number = self._next_number(stream.name)
        unfinished = parent / f"{UNFINISHED}{number}"
        try:
            unfinished.mkdir()
            save(stream.model, unfinished / STATE_FILE)
            tensors = {} if stream.window.images is None else {"images": stream.window.images}
            if stream.answers is not None:
                tensors |= {f"{ANSWERS}{name}": value for name, value in stream.answers.state_dict().items()}
            header = {"format": _FORMAT, "since_update": stream.window.num_since_update, "summary": stream.summary()}
            write_tensors(unfinished / WINDOW_FILE, tensors, "stream", header)
            fsync_file(unfinished / WINDOW_FILE)
            fsync_directory(unfinished)
            self._publish(unfinished, parent, number)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # after an error: the disk may be full

    def state_file(self, name: str) -> Path:
        """Return the file of a stream's model, which :func:`ctta.load` reads."""
        return self._find_file(name, STATE_FILE)

    def read_summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a stream as of its snapshot; DamagedCheckpointError if it cannot be read."""
        with self._detect_damage(name):
            return _check_summary(self._read_header(name)["summary"])

    def restore(self, stream: ServedStream) -> None:
        """Restore the window and the history of a stream whose model was loaded; DamagedCheckpointError on failure."""
        with self._detect_damage(stream.name):
            path = self._find_file(stream.name, WINDOW_FILE)
            header, tensors = read_tensors(path, "stream")
            stream.restore(_check_summary(header["summary"]))
            answers = {name.removeprefix(ANSWERS): each for name, each in tensors.items() if name.startswith(ANSWERS)}
            if stream.answers is not None and answers:  # those of another service may have none
                stream.answers.take_over_(answers)
            stream.window.num_since_update = int(header["since_update"])
            stream.window.images = images = _check_images(tensors.get("images"))
            if images is not None and stream.image_size is None:
                stream.image_size = (images.shape[2], images.shape[3])

    def delete(self, name: str) -> None:
        """Delete the snapshot of a stream, if there is one."""
        path, deleted = (self.directory / f"{prefix}{directory_name(name)}" for prefix in ("", DELETED))
        shutil.rmtree(deleted, ignore_errors=True)
        if path.exists():
            os.rename(path, deleted)  # first, so that a kill leaves no partial directory that looks like a stream
            shutil.rmtree(deleted, ignore_errors=True)
            fsync_directory(self.directory)

    def quarantine(self, name: str) -> Path:
        """Move a stream that cannot be read out of the way, and return where it is for a person to look at."""
        source = self.directory / directory_name(name)
        path = self.directory / f"{DAMAGED}{time.time_ns()}-{source.name}"
        if source.exists():  # or somebody has removed it
            os.rename(source, path)
            fsync_directory(self.directory)
        return path

    @contextmanager
    def _detect_damage(self, name: str) -> Iterator[None]:
        """Raise DamagedCheckpointError if files of a stream are missing or have the wrong content."""
        try:
            yield
        # Errors of the disk pass: they may be temporary, and the file undamaged.
        except (SafetensorError, FileNotFoundError, LookupError, TypeError, ValueError, RecursionError) as error:
            path = self.directory / directory_name(name)
            raise DamagedCheckpointError(f"{path} cannot be read ({error})") from error

    def _read_header(self, name: str) -> dict[str, Any]:
        with safe_open(self._find_file(name, WINDOW_FILE), framework="pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["stream"])
        return header

    def _next_number(self, name: str) -> int:
        return max(self._numbers(self.directory / directory_name(name)), default=0) + 1

    def _publish(self, unfinished: Path, parent: Path, number: int) -> None:
        """Make a snapshot that was written the newest one, and remove those before it."""
        os.rename(unfinished, parent / str(number))
        fsync_directory(parent)
        fsync_directory(self.directory)
        for older in self._numbers(parent):
            if older < number:
                shutil.rmtree(parent / str(older), ignore_errors=True)  # the next write tries again

    def _find_file(self, name: str, file_name: str) -> Path:
        """Return a file of a stream's newest snapshot."""
        if not self.directory.is_dir():  # not damage of a stream: a disk that is not mounted
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.directory))
        parent = self.directory / directory_name(name)
        if not (numbers := self._numbers(parent)):
            raise FileNotFoundError(f"there is no snapshot in {parent}")
        return parent / str(max(numbers)) / file_name

    @staticmethod
    def _numbers(parent: Path) -> set[int]:
        return {int(path.name) for path in parent.iterdir() if path.name.isdecimal()} if parent.is_dir() else set()


@dataclass(frozen=True)
class StreamFactory:
    """What the streams of a service have in common.

    Attributes:
        template: Model that every stream is a fork of; it never adapts itself.
        source_network: Source network as it was trained.
        snapshots: Streams on disk.
        log: Audit log.
        window_size: Images in the window of each stream.
        update_every: Images between two updates.
        time_budget: Fraction of time for updates; None for no limit.
        num_answers: Number of last answers of each stream to remember for feedback.
        keep_pictures: Whether to keep the last image of each stream in memory.
        on_harm: What to do when labels show harm: "reset", "freeze", or None to only report.
    """

    template: AdaptiveModel
    source_network: nn.Module
    snapshots: Snapshots
    log: AuditLog
    window_size: int
    update_every: int
    time_budget: float | None
    num_answers: int = 0
    on_harm: str | None = None
    keep_pictures: bool = False

    def create(self, name: str) -> ServedStream:
        """Return a new stream."""
        stream = self._wrap(name, self.template.fork())
        stream.record(StreamEvent.NEW, "first use")
        return stream

    def read(self, name: str) -> ServedStream:
        """Return a stream as of its snapshot.

        Raises:
            DamagedCheckpointError: If files are missing or damaged.
            CheckpointError: If the stream was saved with another network or other settings.
            OSError: If the disk cannot be read.
        """
        try:
            model = self.load_model(self.snapshots.state_file(name))
        except FileNotFoundError as error:
            raise DamagedCheckpointError(str(error)) from error
        stream = self._wrap(name, model)
        self.snapshots.restore(stream)
        return stream

    def quarantine(self, name: str, error: DamagedCheckpointError) -> None:
        """Move a damaged stream out of the way and record it, so that the stream can start over."""
        cause = f"{error}; moved to {self.snapshots.quarantine(name)}, and the stream starts over"
        logger.error("stream %s: %s", name, cause)
        self.log.append(name, StreamEvent.DAMAGED, cause)

    def load_model(self, path: Path) -> AdaptiveModel:
        """Load a model for a stream of this service; CheckpointError if it was saved with other settings."""
        model = load(path, self.template.copy_of_source(), **unserializable_arguments(self.template))
        if type(model) is not type(self.template):
            found, expected = type(model).__name__, type(self.template).__name__
            raise CheckpointError(f"{path.name} holds a {found}, and the streams of this service are {expected}")
        source = copy_sharing_tensors(self.template.source)  # as fork does: all streams share its weights
        for (_, part), (_, own) in zip(nested_models(model), nested_models(self.template), strict=True):
            _check_same_settings(part, own, path.name)
            part.source = source
        return model

    def load_upload(self, path: Path) -> AdaptiveModel:
        """Load a model that a client sent, whose values must be finite."""
        model = self.load_model(path)
        tensors = (*model.parameters(), *optimizer_tensors(model).values())
        if not all(bool(torch.isfinite(value).all()) for value in tensors):
            raise CheckpointError(f"{path.name} holds values that are not finite")
        return model

    def _wrap(self, name: str, model: AdaptiveModel) -> ServedStream:
        return ServedStream(
            name,
            model,
            source_network=self.source_network,
            window=SampleWindow(self.window_size, self.update_every),
            budget=TimeBudget(self.time_budget),
            log=self.log,
            num_answers=self.num_answers,
            keep_picture=self.keep_pictures,
            on_harm=self.on_harm,
        )


def _check_summary(summary: Any) -> dict[str, Any]:
    """Return a summary, or raise ValueError if it lacks what the service shows and sorts by."""
    if not isinstance(summary, dict):
        raise ValueError("the summary is not an object")
    for name, kind in _SUMMARY.items():
        if not isinstance(summary.get(name), kind):
            raise ValueError(f"the summary has no usable {name!r}")
    return summary


def _check_images(images: Tensor | None) -> Tensor | None:
    """Return the images of a window, or raise ValueError if they are none."""
    if images is not None and (images.ndim != 4 or not bool(((images >= 0) & (images <= 1)).all())):  # also if NaN
        raise ValueError("the window does not hold images in [0, 1]")
    return images


def _check_same_settings(model: AdaptiveModel, own: AdaptiveModel, file_name: str) -> None:
    for name, value in own.hyperparameters.items():
        stored = model.hyperparameters[name]
        if is_serializable(value) and (not is_serializable(stored) or encode(stored) != encode(value)):
            found, expected = (format_hyperparameters({name: each}) for each in (stored, value))
            raise CheckpointError(f"{file_name} was saved with {found}, and this service has {expected}")
