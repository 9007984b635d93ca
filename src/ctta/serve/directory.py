"""The directory of a service: which process owns it, and which method its streams were started with."""

import inspect
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import nn

from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.core.registry import DEFAULT_METHOD, find_methods, resolve_method
from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write, parse_local_path
from ctta.io.provenance import check_same_settings, read_settings
from ctta.nn.surgery import source_fingerprint
from ctta.serve.persistence import Snapshots
from ctta.serve.stream import DEFAULT_BATCH_STATS

SERVICE_FILE, STREAMS_FOLDER, _FORMAT = "service.json", "streams", 2


def build_method(net: nn.Module, name: str, settings: Sequence[str] = ()) -> AdaptiveModel:
    """Build a method with settings that suit single images: BatchNorm statistics are blended by default.

    Args:
        net: The source network.
        name: Name of a method, as :func:`ctta.adapt` takes it.
        settings: Hyperparameters such as ``"lr=1e-4"``, as a user types them.

    Returns:
        The method on a copy of the network.

    >>> from ctta.models import embedded
    >>> build_method(embedded(), "tent", ["lr=1e-4"]).batch_stats
    0.5
    """
    named = resolve_method(name)
    if "batch_stats" in inspect.signature(named.method).parameters:
        named = replace(named, settings={"batch_stats": DEFAULT_BATCH_STATS, **named.settings})
    return named.build(net, **named.parse(settings))


def resume_method(
    net: nn.Module, state_dir: str | os.PathLike[str] | None, settings: Sequence[str] = ()
) -> AdaptiveModel:
    """Build the method that the streams in a directory were started with; the default one if there are none.

    Args:
        net: The source network.
        state_dir: Directory of a service; None for none.
        settings: Hyperparameters such as ``"lr=1e-4"``, as a user types them.

    Returns:
        The method on a copy of the network.

    Raises:
        ConfigError: If the directory has streams of a method that is not one of this library's.
    """
    path = Path(state_dir or ".", SERVICE_FILE)
    if state_dir is None or not path.exists():
        return build_method(net, DEFAULT_METHOD, settings)
    recorded = _read_description(path)
    # The name is not recorded, and presets such as cotta_fast share the class of their method.
    names = find_methods(str(recorded.get("method")))
    if not names:
        raise ConfigError(f"the streams in {state_dir} were started with {recorded.get('method')}: give --method")
    for name in names:
        with suppress(ConfigError):  # a preset may not have such settings
            model = build_method(net, name, settings)
            if format_hyperparameters(model.hyperparameters) == recorded.get("settings"):
                return model
    return build_method(net, names[0], settings)


class StateDirectory:
    """The directory of a service, which one process owns until it releases it.

    Args:
        path: The directory; it is created if needed.

    Raises:
        ConfigError: If another process uses the directory, or it is a URL.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = parse_local_path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / "lock", thread_local=False)  # released by the thread that serves
        try:
            self._lock.acquire(timeout=0)  # two services would overwrite each other's streams
        except Timeout:
            raise ConfigError(
                f"another process serves the streams in {self.path}: stop it, or use another one"
            ) from None

    @property
    def audit_file(self) -> Path:
        """File of the audit log."""
        return self.path / "audit.jsonl"

    def check_same_service(self, model: AdaptiveModel) -> None:
        """Raise ConfigError now, and not at each stream, if they were started with another network or method.

        Args:
            model: Model of the service.
        """
        path, requested = self.path / SERVICE_FILE, _describe_service(model)
        if not path.exists():
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(requested, indent=1))
            return
        hint = "use another directory, or the network and settings that its streams were started with"
        check_same_settings(self.path, _read_description(path), requested, hint=hint)

    def open_snapshots(self) -> Snapshots:
        """Return the snapshots of the streams."""
        return Snapshots(self.path / STREAMS_FOLDER)

    def release(self) -> None:
        """Let another process use the directory."""
        self._lock.release()


def lock_shared(directory: Path) -> int:
    """Lock a directory for all shards of a service on several machines, and return the open file."""
    import fcntl  # not on Windows, where there is no Ray cluster either

    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(f"a service of one process uses {directory}: stop it, or use another one") from None
    return file


def _read_description(path: Path) -> dict[str, Any]:
    """Read what a directory was made with."""
    # Without the file nothing is lost: each stream checks its own settings when it is loaded.
    return read_settings(path, hint="delete this file, and it is written again")


def _describe_service(model: AdaptiveModel) -> dict[str, Any]:
    method = model.unwrapped
    return {
        "format": _FORMAT,
        "network": source_fingerprint(model.source),
        "method": type(method).__name__,
        "settings": format_hyperparameters(method.hyperparameters),
        "guard": "none" if model is method else format_hyperparameters(model.hyperparameters),
    }
