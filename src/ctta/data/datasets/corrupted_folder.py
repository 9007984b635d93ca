"""A tree of labeled image files that are corrupted when they are read."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions import VERSION
from ctta.data.datasets.base import Rows
from ctta.data.datasets.corruptible import CorruptibleDataset
from ctta.data.datasets.image_files import READ_AHEAD, decode_files, describe_files, find_labeled_images, list_folders
from ctta.data.datasets.image_order import sort_images
from ctta.errors import ConfigError, DataError, did_you_mean
from ctta.io.images import Resize, resize_and_center_crop


class CorruptedFolder(CorruptibleDataset):
    """The images of a tree ``<class>/<image>`` under any corruption of :mod:`ctta.data.corruptions`.

    The images are shuffled, because class by class they would be a stream of sorted labels. They are decoded when they
    are read, so the tree may be larger than memory.

    Args:
        root: Root of the tree.
        size: (height, width) to resize to, before the corruption; without it all images must have one size.
        crop: Instead, resize the shorter side to 256 and crop the central 224x224, as ImageNet is preprocessed.
        classes: Names of the classes in the order of the network's outputs, among them every class folder. By default
            a class is labeled by its place among the sorted folders.
        seed: Seed of the shuffle and of the corruptions.

    Raises:
        ConfigError: Both ``size`` and ``crop`` are given.
        DataError: There are no class folders, one has no images, or one is not among the classes.

    >>> import ctta
    >>> data = CorruptedFolder("photos/val", size=(64, 64))                       # doctest: +SKIP
    >>> stream = ctta.data.streams.continual(data, names=("fog", "snow"), severity=3)  # doctest: +SKIP
    """

    labels: NDArray[np.int64]
    read_ahead = READ_AHEAD

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: tuple[int, int] | None = None,
        crop: bool = False,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        folder = Path(root).expanduser()
        check_integer("seed", seed)
        if size and crop:
            raise ConfigError(f"give size or crop, not both: a crop has 224x224 pixels, not {size}")
        described_size = "crop 224" if crop else str(size)
        hint = "check the path; a class is a folder of images"
        files = find_labeled_images(folder, None, described_size, num_per_class=None, images=None, hint=hint)
        folders = list_folders(folder)
        self.class_names, self.seed = tuple(classes or folders), seed
        self.transform = resize_and_center_crop if crop else Resize(size) if size else None
        if unknown := [name for name in folders if name not in self.class_names]:
            raise DataError(
                f"the folder {folder / unknown[0]} is not among the {len(self.class_names)} given classes"
                f"{did_you_mean(unknown[0], self.class_names)}: rename it, or add it to the classes"
            )
        assert files.labels is not None
        label_of = np.array([self.class_names.index(name) for name in folders])
        order = sort_images(folder, [path.relative_to(folder).as_posix() for path in files.paths], "shuffle", seed=seed)
        self.paths = tuple(files.paths[row] for row in order)
        self.labels = label_of[files.labels[order]]
        described = describe_files(folder, self.paths, f"{described_size} {self.class_names}")
        self.name = f"folder {described} corruptions={VERSION} seed={seed}"

    def __len__(self) -> int:
        return len(self.paths)

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor]:
        """Decode some of the images, and return them with their labels."""
        paths = [self.paths[row] for row in rows]
        pixels = np.stack(decode_files(paths, self.transform, hint="give a size (height, width) to resize to"))
        return pixels, torch.from_numpy(self.labels[rows])
