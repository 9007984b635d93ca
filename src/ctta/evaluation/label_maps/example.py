"""One scene to look at: the image, the truth, and what the network said of it before and after adapting."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = "examples"  # of a run

Map = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Example:
    """A scene that adapting changed; image and maps have the same height and width."""

    method: str  # as a table calls it
    kind: str  # "best" or "worst" change of the method
    stream_hash: str
    domain: str
    segment: int
    class_names: tuple[str, ...]
    accuracy_before: float  # share of right pixels
    accuracy_after: float
    image: NDArray[np.uint8]  # (H, W, 3)
    truth: Map
    before: Map
    after: Map


def write_example(example: Example, path: Path) -> None:
    """One compressed file, all of it or none, whenever the process is killed."""
    fields: dict[str, Any] = {name: np.asarray(value) for name, value in vars(example).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **fields)  # before 2.1, NumPy takes every other keyword for an array
    os.replace(temporary, path)


def read_examples(run: Path) -> list[Example]:
    """All of a run's folder, of each method the best change before the worst; none where none were kept."""
    return [_read(path) for path in sorted((run / FOLDER).glob("*.npz"))]


def _read(path: Path) -> Example:
    with np.load(path) as file:
        fields = {name: value if value.ndim > 1 else value.tolist() for name, value in file.items()}
    return Example(**fields | {"class_names": tuple(fields["class_names"])})
