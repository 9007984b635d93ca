"""The clean CIFAR-10 and CIFAR-100 archives, to corrupt or to calibrate on."""

import pickle
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.errors import DataError
from ctta.streams.remedies import for_clean_cifar

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
        folder: ``cifar-10-batches-py`` or ``cifar-100-python`` as extracted, or ``ctta.datasets.get("cifar10")``.
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
