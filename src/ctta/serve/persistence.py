"""Streams on disk, and the factory that creates them or reads them back."""

import errno
import logging
import os
import re
import shutil
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctta.checkpoint.encoding import encode, is_serializable
from ctta.checkpoint.files import load, save
from ctta.checkpoint.manifest import nested_models, optimizer_tensors, unserializable_arguments
from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.errors import CheckpointError, DamagedCheckpointError
from ctta.io.atomic import fsync_directory, fsync_file
from ctta.io.tensors import read_header, read_tensors, write_tensors
from ctta.nn.surgery import copy_sharing_tensors
from ctta.serve.audit import AuditLog, StreamEvent
from ctta.serve.http import STREAM_NAME_PATTERN
from ctta.serve.options import ServiceOptions
from ctta.serve.stream import ServedStream

logger = logging.getLogger("ctta.serve")

STATE_FILE, WINDOW_FILE = "state.safetensors", "window.safetensors"
ANSWERS, KEYED = "answers.", "keyed."  # what the names of their tensors begin with in the window file
_FORMAT = 2  # of the window file
UNFINISHED = "unfinished-"
DELETED, DAMAGED = ".deleted-", ".damaged-"  # no stream's directory starts with a dot
INCARNATION = 10**9  # snapshots that one incarnation of a process may write
MOVE_ATTEMPTS = 20
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


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one, as far as possible; whoever finds what is left tries again."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _check_link(path: Path) -> None:
    """Raise OSError if a path is a link to what is not there, such as a disk that is not mounted: it may come back."""
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ENODEV, "its link leads nowhere", str(path))


class ShardLostError(OSError):
    """Another process has claimed the streams, so this one must neither answer nor save."""


class Snapshots:
    """Snapshots of streams as ``<directory>/<stream>/<number>/``, of which the highest number counts.

    A snapshot is written beside its predecessor under another name, flushed and renamed, so that the streams can be
    read whenever the process is killed.

    Args:
        directory: Where the streams are kept; it is created if needed.
        owns: Returns whether a stream belongs to this process; others are not listed.
        incarnation: The numbers of this process start with it, so that whatever a former process writes late has a
            lower number; 0 to only look at the snapshots of others, None if this process owns the directory alone.
        check_owner: Called before anything is changed; raises :class:`ShardLostError` if another process owns it now.
    """

    def __init__(
        self,
        directory: Path,
        *,
        owns: Callable[[str], bool] = lambda _stream: True,
        incarnation: int | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory, self.owns, self._check_owner = directory, owns, check_owner
        self._first_number = (incarnation or 0) * INCARNATION
        directory.mkdir(parents=True, exist_ok=True)
        if incarnation is None:  # or what looks like a leftover may be what another process is writing
            for pattern in (f"*/{UNFINISHED}*", f"{DELETED}*"):
                for leftover in list(directory.glob(pattern)):  # of a process that was killed
                    _remove(leftover)

    def names(self) -> Iterator[str]:
        """Yield every stream that has a snapshot, or cannot be read now, and belongs to this process."""
        for path in sorted(self.directory.iterdir()):
            if (name := parse_directory_name(path.name)) and self.owns(name):
                with suppress(OSError):
                    if not self.numbers(name):
                        continue
                yield name

    def write(self, stream: ServedStream) -> None:
        """Replace the snapshot of a stream by its current state; OSError if that fails, and the old one remains."""
        self._check_owner()
        parent, number = self._local_directory(stream.name), self._next_number(stream.name)
        parent.mkdir(exist_ok=True)
        unfinished = parent / f"{UNFINISHED}{number}"
        _remove(unfinished)  # of an attempt that failed, when it could not be removed either
        try:
            unfinished.mkdir()
            save(stream.model, unfinished / STATE_FILE)
            tensors = {} if stream.window.images is None else {"images": stream.window.images}
            if stream.answers is not None:
                tensors |= {f"{ANSWERS}{name}": value for name, value in stream.answers.state_dict().items()}
            keyed, logits = stream.keyed.state_dict()
            tensors |= {f"{KEYED}{number}": value for number, value in logits.items()}
            header = {"format": _FORMAT, "since_update": stream.window.num_since_update, "summary": stream.summary()}
            header["keyed"] = keyed
            write_tensors(unfinished / WINDOW_FILE, tensors, "stream", header)
            fsync_file(unfinished / WINDOW_FILE)
            fsync_directory(unfinished)
            self._publish(unfinished, stream.name, number)
        finally:
            _remove(unfinished)  # after an error: the disk may be full
        for older in self.numbers(stream.name):
            if older < number:
                _remove(parent / str(older))  # the next write tries again

    def take_over(self, name: str) -> Path:
        """Return the file of a stream's model, which :func:`ctta.load` reads.

        The newest snapshot gets a number of this incarnation: a former process may still be about to replace it.
        """
        first, parent = self._first_number, self._local_directory(name)
        for _ in range(MOVE_ATTEMPTS):
            newest = max(self.numbers(name), default=first)
            if newest >= first:
                return self._find(name, STATE_FILE)
            try:
                os.rename(parent / str(newest), parent / str(first))  # not flushed: either name will do
            except FileNotFoundError:  # a former process has just replaced it by another one
                time.sleep(0.05)
        raise OSError(f"the snapshots of stream {name} change all the time: is another service using them?")

    def read_summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a stream as of its snapshot; DamagedCheckpointError if it cannot be read."""
        before = self.numbers(name)
        try:
            with self._detect_damage(name):
                return _check_summary(read_header(self._find(name, WINDOW_FILE), "stream")["summary"])
        except DamagedCheckpointError:
            if self.numbers(name) == before:
                raise
            return self.read_summary(name)  # a former process has just replaced it

    def restore(self, stream: ServedStream) -> None:
        """Restore the window and the history of a stream whose model was loaded; DamagedCheckpointError on failure."""
        with self._detect_damage(stream.name):
            header, tensors = read_tensors(self._find(stream.name, WINDOW_FILE), "stream")
            stream.restore(_check_summary(header["summary"]))
            answers, logits = (
                {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
                for prefix in (ANSWERS, KEYED)
            )
            stream.keyed.load_state_dict_(header.get("keyed", []), logits)
            if stream.answers is not None and answers:  # those of another service may have none
                stream.answers.take_over_(answers)
            stream.window.num_since_update = int(header["since_update"])
            if (images := tensors.get("images")) is not None:
                if images.ndim != 4 or not bool(((images >= 0) & (images <= 1)).all()):  # also if NaN
                    raise ValueError("the window does not hold images in [0, 1]")
                stream.image_size = stream.image_size or (images.shape[2], images.shape[3])
            stream.window.images = images

    def delete(self, name: str) -> None:
        """Delete the snapshot of a stream, if there is one."""
        self._check_owner()
        path, deleted = (self.directory / f"{prefix}{directory_name(name)}" for prefix in ("", DELETED))
        _remove(deleted)
        try:
            os.rename(path, deleted)  # first, so that a kill leaves no partial directory that looks like a stream
        except FileNotFoundError:
            return
        _remove(deleted)
        try:
            fsync_directory(self.directory)
        except OSError as error:  # it is deleted nevertheless, unless the power fails now
            logger.warning("the deletion of stream %s could not be flushed: %s", name, error)

    def quarantine(self, name: str) -> Path | None:
        """Move a stream that cannot be read out of the way for a person to look at.

        Returns:
            Where it is now; None if there is nothing left of it.

        Raises:
            OSError: If it cannot be moved; then it is where it was.
        """
        self._check_owner()
        damaged = self._local_directory(name)
        path = self.directory / f"{DAMAGED}{time.time_ns()}-{damaged.name}"
        try:
            os.rename(damaged, path)  # not flushed: after a power failure it is found and moved again
        except FileNotFoundError:
            return None
        return path

    def numbers(self, name: str) -> set[int]:
        """Return the numbers of a stream's snapshots; OSError if they cannot be read."""
        parent = self._local_directory(name)
        try:
            return {int(each) for each in os.listdir(parent) if each.isdecimal()}
        except (FileNotFoundError, NotADirectoryError):
            _check_link(parent)
            return set()

    def _local_directory(self, name: str) -> Path:
        return self.directory / directory_name(name)

    @contextmanager
    def _detect_damage(self, name: str) -> Iterator[None]:
        """Raise DamagedCheckpointError if files of a stream are missing or have the wrong content."""
        try:
            yield
        # Errors of the disk pass: they may be temporary, and the file undamaged.
        except (FileNotFoundError, LookupError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"{self._local_directory(name)} cannot be read ({error})") from error

    def _next_number(self, name: str) -> int:
        newest, first = max(self.numbers(name), default=0), self._first_number
        if first and newest >= first + INCARNATION:
            raise ShardLostError(f"stream {name} has a snapshot of a newer process, {newest // INCARNATION}")
        return max(newest + 1, first)

    def _publish(self, unfinished: Path, name: str, number: int) -> None:
        """Make a snapshot that was written the newest one."""
        parent = self._local_directory(name)
        os.rename(unfinished, parent / str(number))
        fsync_directory(parent)
        fsync_directory(self.directory)
        for leftover in parent.glob(f"{UNFINISHED}*"):  # of a process that ended while it wrote
            if int(leftover.name.removeprefix(UNFINISHED)) < number:
                _remove(leftover)

    def _find(self, name: str, file_name: str) -> Path:
        """Return a file of a stream's newest snapshot."""
        if not self.directory.is_dir():  # not damage of a stream: a disk that is not mounted
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.directory))
        parent = self._local_directory(name)
        if not (numbers := self.numbers(name)):
            if parent.is_symlink():
                raise OSError(errno.ENODEV, "the directory that its link leads to is empty", str(parent))
            raise FileNotFoundError(f"there is no snapshot in {parent}")
        path = parent / str(max(numbers)) / file_name
        _check_link(path.parent)
        _check_link(path)
        return path


@dataclass(frozen=True)
class StreamFactory:
    """What the streams of a service have in common."""

    template: AdaptiveModel  # every stream is a fork of it; it never adapts itself
    source_network: nn.Module  # as it was trained
    snapshots: Snapshots
    log: AuditLog
    options: ServiceOptions

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
            model = self.load_model(self.snapshots.take_over(name))
        except FileNotFoundError as error:
            raise DamagedCheckpointError(str(error)) from error
        stream = self._wrap(name, model)
        self.snapshots.restore(stream)
        return stream

    def quarantine(self, name: str, error: DamagedCheckpointError) -> None:
        """Move a damaged stream out of the way and record it, so that the stream can start over."""
        path = self.snapshots.quarantine(name)
        cause = f"{error}; {f'moved to {path}, and ' if path else ''}the stream starts over"
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
        return ServedStream(name, model, self.source_network, self.log, self.options)


def _check_summary(summary: Any) -> dict[str, Any]:
    """Return a summary, or raise ValueError if it lacks what the service shows and sorts by."""
    if not isinstance(summary, dict):
        raise ValueError("the summary is not an object")
    for name, kind in _SUMMARY.items():
        if not isinstance(summary.get(name), kind):
            raise ValueError(f"the summary has no usable {name!r}")
    return summary


def _check_same_settings(model: AdaptiveModel, own: AdaptiveModel, file_name: str) -> None:
    for name, value in own.hyperparameters.items():
        stored = model.hyperparameters[name]
        if is_serializable(value) and (not is_serializable(stored) or encode(stored) != encode(value)):
            found, expected = (format_hyperparameters({name: each}) for each in (stored, value))
            raise CheckpointError(f"{file_name} was saved with {found}, and this service has {expected}")
