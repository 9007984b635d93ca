"""The clean CIFAR-10 and CIFAR-100 archives, to corrupt or to calibrate on."""

import pickle
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.datasets.arrays import PixelArray, hash_array
from ctta.datasets.hints import for_cifar_c, for_clean_cifar
from ctta.errors import DataError
from ctta.validation import check_integer

SEVERITIES = 5

#: What the archives' pickles are made of; anything else in a pickle could run code.
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def clean_cifar(
    folder: str | PathLike[str], split: Literal["train", "test"] = "test"
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 32, 32, 3) and labels of the python version of CIFAR-10 or CIFAR-100.

    Args:
        folder: ``cifar-10-batches-py`` or ``cifar-100-python`` as extracted, or ``ctta.datasets.download("cifar10")``.
        split: ``train`` (50,000) or ``test`` (10,000).
    """
    root = Path(folder)
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if (root / "test_batch").exists() or (root / "data_batch_1").exists():
        names = ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]
        label_key = "labels"
    elif (root / "test").exists() or (root / "train").exists():
        names, label_key = [split], "fine_labels"
    else:
        ten, hundred = ("test_batch", "test") if split == "test" else ("data_batch_1", "train")
        raise DataError(
            f"{root} holds no batches of CIFAR: {ten} (CIFAR-10) or {hundred} (CIFAR-100) is missing: "
            f"{for_clean_cifar(root)}"
        )
    parts = [_read(root / name, label_key) for name in names]
    images = np.concatenate([pixels for pixels, _ in parts])
    # Stored plane by plane: red, green, blue.
    return np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.concatenate(
        [labels for _, labels in parts]
    )


def _read(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    remedy = for_clean_cifar(path.parent)
    if not path.is_file():
        raise DataError(f"{path} is missing: {remedy}")
    try:
        with path.open("rb") as file:
            content = _HarmlessUnpickler(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"], dtype=np.uint8)
        labels = np.asarray(content[label_key.encode()], dtype=np.int64)
    # A damaged pickle fails in every way there is.
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise DataError(f"{path} is truncated or no batch of CIFAR ({error}): {remedy}") from error
    if pixels.shape != (len(labels), 3072):
        raise DataError(f"{path} holds {pixels.shape} values for {len(labels)} labels; expected 3,072 each: {remedy}")
    return pixels, labels


class _HarmlessUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


class CifarC:
    """A folder with one ``<corruption>.npy`` (five severities of N images) and ``labels.npy``.

    The arrays are memory-mapped: nothing is read before a batch asks for it, and nothing is copied twice.

    Args:
        folder: as extracted from the published archive, or as ``ctta.corruptions.write_cifar_c`` writes it.
    """

    read_ahead = 0  # mapped files need no decoding

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        labels = np.asarray(self._open("labels"))
        self.count = len(labels) // SEVERITIES if labels.ndim == 1 else 0
        self.labels = labels.reshape(-1)[: self.count]
        repeated = self.count > 0 and np.array_equal(labels, np.tile(self.labels, SEVERITIES))
        if not repeated or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{self.folder / 'labels.npy'} holds {labels.dtype} {labels.shape}; expected the labels of N images as "
                f"whole numbers, five times over (once per severity): {for_cifar_c(self.folder)}"
            )
        # By content, since folders are called differently on every machine.
        self.name = f"cifar-c[{self.count} images, labels {hash_array(self.labels.astype('<i8'))}]"

    def domain(self, corruption: str, severity: int) -> PixelArray:
        severity = check_integer("severity", severity, 1, SEVERITIES)
        pixels = self._open(corruption)
        expected = SEVERITIES * self.count
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != expected or pixels.shape[3] != 3:
            raise DataError(
                f"{self.folder / corruption}.npy holds {pixels.dtype} {pixels.shape}; "
                f"expected uint8 ({expected}, H, W, 3): {for_cifar_c(self.folder)}"
            )
        pixels = pixels[self.count * (severity - 1) : self.count * severity]
        # Some rows of each part tell one folder from another, and reading all of it would take minutes.
        sample = pixels[np.linspace(0, self.count - 1, min(self.count, 64)).astype(int)]
        name = f"{self.name} {corruption} {severity} [{hash_array(sample)}]"
        return PixelArray(name, pixels, self.labels)

    def _open(self, stem: str) -> NDArray[Any]:
        path = self.folder / f"{stem}.npy"
        remedy = for_cifar_c(self.folder)
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in self.folder.glob("*.npy"))) or "no .npy files"
            raise DataError(f"{path} is missing ({self.folder} holds {there}): {remedy}")
        try:
            # By name only once it is known to be an array: numpy would leave a damaged archive open.
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
            opened: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} is truncated or not a .npy file ({error}): {remedy}") from error
        return opened
