"""Where a long test keeps what is done, so that it goes on there after a kill.

Every evaluation is a folder of :func:`ctta.evaluate`, and every other result a JSON file. The folder has a part for
each network, method and set of pictures, so that results of others are never read.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from ctta.advise.candidates import Candidate
from ctta.advise.pictures import Pictures
from ctta.core.model import AdaptiveModel
from ctta.core.registry import resolve_method
from ctta.data.datasets.arrays import hash_array
from ctta.data.streams import Stream
from ctta.evaluation import Result, evaluate
from ctta.evaluation.loop import OnBatch
from ctta.io.atomic import atomic_write
from ctta.nn.surgery import fingerprint


class WorkFolder:
    """A folder that results are written to, or read from if they are there.

    Args:
        folder: The folder.
        identity: Everything that all results depend on, as plain JSON.
    """

    def __init__(self, folder: Path, identity: Any) -> None:
        self.path = folder / shorten(identity)
        self.path.mkdir(parents=True, exist_ok=True)

    def read_or_make(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a file holds, or make it and write the file.

        Args:
            name: Name of the file.
            make: Returns what JSON can hold.

        Returns:
            What the file holds.
        """
        path = self.path / name
        if not path.exists():
            content = make()
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(content), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    def evaluate(
        self,
        model: AdaptiveModel,
        stream: Stream,
        name: str,
        *,
        label: str | None = None,
        on_batch: OnBatch | None = None,
    ) -> Result:
        """Evaluate a model, go on with an evaluation that was interrupted, or read one that is complete.

        Args:
            model: A new model.
            stream: The stream.
            name: Name of the evaluation, unique in the folder.
            label: Name of the method in tables.
            on_batch: Called after each new batch.

        Returns:
            The result.
        """
        return evaluate(model, stream, folder=self.path / name, name=label, on_batch=on_batch)


@contextmanager
def open_folder(folder: str | os.PathLike[str] | None, prefix: str) -> Iterator[Path]:
    """Yield a folder, or a temporary one, which is removed, for None.

    Args:
        folder: The folder.
        prefix: What the name of a temporary folder begins with.

    Yields:
        The folder.
    """
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix=prefix) as path:
        yield Path(path)


def identify(net: nn.Module, pictures: Pictures) -> list[str]:
    """Return what identifies a network and the pictures that it is tested on.

    Args:
        net: The network.
        pictures: The pictures.

    Returns:
        Hashes of its weights, of its answers, as code can change too, and of the pictures.
    """
    arrays = pictures.predicted, pictures.images, pictures.targets
    return [fingerprint(net), *(hash_array(each) for each in arrays), str(pictures.seed)]


def identify_method(candidate: Candidate) -> str:
    """Return what identifies a method: its name and settings, and the content of its file if a user has written it."""
    name = resolve_method(candidate.method).name
    if not name.startswith("file:"):
        return candidate.key
    code = Path(name.removeprefix("file:").rpartition(":")[0]).read_bytes()
    return f"{candidate.key} {sha256(code).hexdigest()[:16]}"


def shorten(identity: Any) -> str:
    """Return a short hash of plain JSON.

    >>> shorten(["tent", 32])
    'b42a30de569c'
    """
    return sha256(json.dumps(identity).encode()).hexdigest()[:12]
