"""The images that come with the library: the first 2,000 of CIFAR-10's test set."""

from importlib.resources import as_file, files

import numpy as np

from ctta.corruptions.frost import PhotoPaths
from ctta.streams.corrupted import Corrupted


def sample(*, seed: int = 0, frost_photos: PhotoPaths | None = None) -> Corrupted:
    """2,000 CIFAR-10 test images to be corrupted, as a data set for the protocols.

    >>> from ctta.streams import continual
    >>> len(continual(sample(), limit=500, batch_size=50))
    150

    Args:
        seed: of the corruptions' draws.
        frost_photos: as for :class:`Corrupted`.
    """
    with as_file(files("ctta.streams") / "sample.npz") as path, np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Corrupted(images, labels, name="cifar10-sample", seed=seed, frost_photos=frost_photos)
