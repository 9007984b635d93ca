"""A tree of labeled image files that are corrupted when they are read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.corruptions import VERSION, corrupt
from ctta.corruptions.registry import check_corruption
from ctta.datasets.base import Rows
from ctta.datasets.image_files import READ_AHEAD, decode_files, describe_files, find_labeled_images, list_folders
from ctta.datasets.image_order import sort_images
from ctta.errors import DataError, did_you_mean
from ctta.io.images import Resize, to_unit_floats
from ctta.validation import check_integer

#: The name of the "corruption" that leaves images as they are.
CLEAN = "none"


class CorruptedFolder:
    """The images of a tree ``<class>/<image>`` under any corruption of :mod:`ctta.corruptions`.

    The images are shuffled, because class by class they would be a stream of sorted labels. They are decoded when they
    are read, so the tree may be larger than memory.

    Args:
        root: Root of the tree.
        size: (height, width) to resize to, before the corruption; without it all images must have one size.
        classes: Names of the classes in the order of the network's outputs, among them every class folder. By default
            a class is labeled by its place among the sorted folders.
        seed: Seed of the shuffle and of the corruptions.

    Raises:
        DataError: There are no class folders, one has no images, or one is not among the classes.

    >>> import ctta
    >>> data = CorruptedFolder("photos/val", size=(64, 64))                       # doctest: +SKIP
    >>> stream = ctta.streams.continual(data, names=("fog", "snow"), severity=3)  # doctest: +SKIP
    """

    read_ahead = READ_AHEAD

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: tuple[int, int] | None = None,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        folder = Path(root).expanduser()
        check_integer("seed", seed)
        hint = "check the path; a class is a folder of images"
        files = find_labeled_images(folder, None, str(size), num_per_class=None, images=None, hint=hint)
        folders = list_folders(folder)
        self.class_names, self.seed = tuple(classes or folders), seed
        self.transform = Resize(size) if size else None
        if unknown := [name for name in folders if name not in self.class_names]:
            raise DataError(
                f"the folder {folder / unknown[0]} is not among the {len(self.class_names)} given classes"
                f"{did_you_mean(unknown[0], self.class_names)}: rename it, or add it to the classes"
            )
        assert files.labels is not None
        label_of = np.array([self.class_names.index(name) for name in folders])
        order = sort_images(folder, [path.relative_to(folder).as_posix() for path in files.paths], "shuffle", seed=seed)
        self.paths = tuple(files.paths[row] for row in order)
        self.labels: NDArray[np.int64] = label_of[files.labels[order]]
        described = describe_files(folder, self.paths, f"{size} {self.class_names}")
        self.name = f"folder {described} corruptions={VERSION} seed={seed}"

    def domain(self, corruption: str, severity: int) -> "CorruptedFolderDomain":
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, or ``"none"`` for the images as they are.
            severity: 1 (weak) to 5 (strong).

        Returns:
            The images, which are decoded and corrupted when they are read.
        """
        if corruption != CLEAN:
            check_corruption(corruption, severity)
        return CorruptedFolderDomain(self, corruption, severity)


@dataclass(frozen=True)
class CorruptedFolderDomain:
    """The images of :class:`CorruptedFolder` under one corruption; each is the same whenever it is read.

    Attributes:
        data: The tree.
        corruption: Name of the corruption, or ``"none"``.
        severity: 1 (weak) to 5 (strong).
    """

    data: CorruptedFolder
    corruption: str
    severity: int

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        return f"{self.data.name} {self.corruption} {self.severity}"

    @property
    def labels(self) -> NDArray[np.integer[Any]]:
        """Label of each image."""
        return self.data.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""
        return self.data.class_names

    def __len__(self) -> int:
        return len(self.data.paths)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Decode and corrupt some of the images; return them as floats in [0, 1], with their labels."""
        paths = [self.data.paths[row] for row in rows]
        pixels = np.stack(decode_files(paths, self.data.transform, hint="give a size (height, width) to resize to"))
        if self.corruption != CLEAN:
            pixels = corrupt(pixels, self.corruption, self.severity, seed=self.data.seed, index=rows)
        return to_unit_floats(pixels), torch.from_numpy(self.data.labels[rows])
