"""CIFAR-10 and CIFAR-100, clean and corrupted, in their published formats."""

import pickle
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ctta.core.validation import check_choice, check_integer
from ctta.data.datasets.arrays import PixelArray, hash_array
from ctta.data.datasets.base import no_clean_images
from ctta.data.datasets.cache import suggest_download
from ctta.data.datasets.corruptible import CLEAN
from ctta.errors import DataError

NUM_SEVERITIES = 5
#: What the pickles of the archives consist of; anything else in a pickle could run code.
_SAFE_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def clean_cifar(
    folder: str | PathLike[str], split: Literal["train", "test"] = "test"
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read the Python version of CIFAR-10 or CIFAR-100.

    Args:
        folder: ``cifar-10-batches-py`` or ``cifar-100-python`` as extracted, or ``download("cifar10")``.
        split: "train" (50,000 images) or "test" (10,000 images).

    Returns:
        Images of shape (N, 32, 32, 3) and N labels.

    Raises:
        DataError: A file is missing or damaged.
    """
    root = Path(folder)
    check_choice("split", split, ("train", "test"))
    if (root / "test_batch").exists() or (root / "data_batch_1").exists():
        names = ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]
        label_key = "labels"
    elif (root / "test").exists() or (root / "train").exists():
        names, label_key = [split], "fine_labels"
    else:
        cifar10, cifar100 = ("test_batch", "test") if split == "test" else ("data_batch_1", "train")
        raise DataError(
            f"{root} contains neither {cifar10} (CIFAR-10) nor {cifar100} (CIFAR-100): {_clean_cifar_hint(root)}"
        )
    parts = [_read_batch_file(root / name, label_key) for name in names]
    images = np.concatenate([pixels for pixels, _ in parts])
    # Stored as one plane per color.
    return np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.concatenate(
        [labels for _, labels in parts]
    )


class CifarC:
    """CIFAR-10-C or CIFAR-100-C: one ``<corruption>.npy`` per corruption (five severities of N images), ``labels.npy``.

    The arrays are memory-mapped: nothing is read before a batch needs it.

    Args:
        folder: As extracted from the published archive, or as ``ctta.data.corruptions.write_cifar_c`` writes it.

    Raises:
        DataError: ``labels.npy`` is missing or damaged.
    """

    read_ahead = 0  # mapped files need no decoding

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        labels = np.asarray(self._open("labels"))
        self.num_images = len(labels) // NUM_SEVERITIES if labels.ndim == 1 else 0
        self.labels = labels.reshape(-1)[: self.num_images]
        is_repeated = self.num_images > 0 and np.array_equal(labels, np.tile(self.labels, NUM_SEVERITIES))
        if not is_repeated or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{self.folder / 'labels.npy'} contains {labels.dtype} {labels.shape}; expected the labels of N images "
                f"as integers, repeated five times (once per severity): {_cifar_c_hint(self.folder)}"
            )
        # By content, as folders have other names on every machine.
        self.name = f"cifar-c[{self.num_images} images, labels {hash_array(self.labels.astype('<i8'))}]"

    def domain(self, corruption: str, severity: float) -> PixelArray:
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, which is that of its file.
            severity: 1 (weak) to 5 (strong).

        Returns:
            The images, memory-mapped.

        Raises:
            DataError: The file is missing or damaged.
        """
        if corruption == CLEAN:
            raise no_clean_images(self.folder, "in_memory(*clean_cifar(folder), name='clean')")
        severity = check_integer("severity", severity, 1, NUM_SEVERITIES)
        pixels = self._open(corruption)
        expected = NUM_SEVERITIES * self.num_images
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != expected or pixels.shape[3] != 3:
            raise DataError(
                f"{self.folder / corruption}.npy contains {pixels.dtype} {pixels.shape}; "
                f"expected uint8 ({expected}, H, W, 3): {_cifar_c_hint(self.folder)}"
            )
        pixels = pixels[self.num_images * (severity - 1) : self.num_images * severity]
        # A sample of the rows tells folders apart; reading all of them would take minutes.
        sample = pixels[np.linspace(0, self.num_images - 1, min(self.num_images, 64)).astype(int)]
        name = f"{self.name} {corruption} {severity} [{hash_array(sample)}]"
        return PixelArray(name, pixels, self.labels)

    def _open(self, stem: str) -> NDArray[Any]:
        """Memory-map one of the files."""
        path = self.folder / f"{stem}.npy"
        hint = _cifar_c_hint(self.folder)
        if not path.is_file():
            present = ", ".join(sorted(other.stem for other in self.folder.glob("*.npy"))) or "no .npy files"
            raise DataError(f"{path} is missing ({self.folder} contains {present}): {hint}")
        try:
            # Check the magic first: given the path of a damaged archive, numpy would leave the file open.
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
            opened: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} is truncated or not a .npy file ({error}): {hint}") from error
        return opened


class _SafeUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses to call anything else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE_GLOBALS:
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_batch_file(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read a pickled batch of images of shape (N, 3072), and its labels."""
    hint = _clean_cifar_hint(path.parent)
    if not path.is_file():
        raise DataError(f"{path} is missing: {hint}")
    try:
        with path.open("rb") as file:
            content = _SafeUnpickler(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"], dtype=np.uint8)
        labels = np.asarray(content[label_key.encode()], dtype=np.int64)
    # A damaged pickle can raise any of these.
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise DataError(f"{path} is truncated or not a batch of CIFAR ({error}): {hint}") from error
    if pixels.shape != (len(labels), 3072):
        raise DataError(
            f"{path} contains pixels of shape {pixels.shape} for {len(labels)} labels; expected ({len(labels)}, 3072): "
            f"{hint}"
        )
    return pixels, labels


def _clean_cifar_hint(folder: Path) -> str:
    return f"{suggest_download(folder, 'cifar10')}, or extract the archive of CIFAR-100 again"


def _cifar_c_hint(folder: Path) -> str:
    return f"{suggest_download(folder, 'cifar10-c')} (or cifar100-c), or create your own: ctta corrupt SRC DST"
