"""CIFAR-10 and CIFAR-100, clean and corrupted, and ImageNet-C, in their published formats."""

import pickle
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions.registry import HOLD_OUT, KIND_OF, check_severity
from ctta.data.datasets.base import CLEAN, PixelArray, hash_array, no_clean_images
from ctta.data.datasets.cache import suggest_download
from ctta.data.datasets.image_files import (
    READ_AHEAD,
    ImageFiles,
    Order,
    check_order,
    check_selection,
    find_labeled_images,
    list_folders,
)
from ctta.errors import ConfigError, DataError
from ctta.io.images import resize_and_center_crop

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
    """Read CIFAR-10 or CIFAR-100, in their Python or binary version.

    Args:
        folder: ``cifar-10-batches-py``, ``cifar-100-python``, ``cifar-10-batches-bin`` or ``cifar-100-binary`` as
            extracted, or ``download("cifar10")``.
        split: "train" (50,000 images) or "test" (10,000 images).

    Returns:
        Images of shape (N, 32, 32, 3) and N labels.

    Raises:
        DataError: A file is missing or damaged.
    """
    root = Path(folder)
    check_choice("split", split, ("train", "test"))
    for ending, read in (("", _read_batch_file), (".bin", _read_binary_file)):
        if any((root / f"{name}{ending}").is_file() for name in ("test_batch", "data_batch_1")):
            names = ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]
            label_key = "labels"
        elif any((root / f"{name}{ending}").is_file() for name in ("test", "train")):
            names, label_key = [split], "fine_labels"
        else:
            continue
        parts = [read(root / f"{name}{ending}", label_key) for name in names]
        break
    else:
        cifar10, cifar100 = ("test_batch", "test") if split == "test" else ("data_batch_1", "train")
        raise DataError(
            f"{root} contains neither {cifar10} (CIFAR-10) nor {cifar100} (CIFAR-100): {_clean_cifar_hint(root)}"
        )
    images = np.concatenate([pixels for pixels, _ in parts])
    images = np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # stored as one plane per color
    return images, np.concatenate([labels for _, labels in parts])


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


#: What a damaged pickle can raise.
_PICKLE_ERRORS = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


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
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        # A damaged pickle can raise any of these.
        raise DataError(f"{path} is truncated or not a batch of CIFAR ({error}): {hint}") from error
    if pixels.shape != (len(labels), 3072):
        raise DataError(
            f"{path} contains pixels of shape {pixels.shape} for {len(labels)} labels; expected ({len(labels)}, 3072): "
            f"{hint}"
        )
    return pixels, labels


def _read_binary_file(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images of shape (N, 3072) and their labels: CIFAR-100 has a coarse label before the fine one."""
    num_labels = 1 if label_key == "labels" else 2
    content = np.fromfile(path, np.uint8) if path.is_file() else np.empty(0, np.uint8)
    if content.size == 0 or content.size % (num_labels + 3072):
        raise DataError(
            f"{path} is missing or truncated: it has {content.size} bytes, expected {num_labels + 3072} per image: "
            f"{_clean_cifar_hint(path.parent)}"
        )
    records = content.reshape(-1, num_labels + 3072)
    return records[:, num_labels:], records[:, num_labels - 1].astype(np.int64)


def _clean_cifar_hint(folder: Path) -> str:
    return f"{suggest_download(folder, 'cifar10')} (or cifar100)"


def _cifar_c_hint(folder: Path) -> str:
    return f"{suggest_download(folder, 'cifar10-c')} (or cifar100-c), or create your own: ctta corrupt SRC DST"


#: The archive of ImageNet-C in which each corruption is published.
GROUP_OF = {name: "extra" if name in HOLD_OUT else kind for name, kind in KIND_OF.items()}


class ImageNetC:
    """The published tree ``<corruption>/<severity>/<class>/<image>.JPEG``, of 224x224 pixels.

    A class is labeled by its place among the class folders that exist, sorted by name: with all 1,000 of them these are
    ImageNet's labels. Every domain must have the same images.

    Args:
        folder: The root, with the groups of the archives (noise, blur, ...) extracted into it, or each into its own
            folder, as ``ctta.data.datasets.download("imagenet-c/noise").parent`` has them.
        images: A text file with one ``<class>/<image>.JPEG`` per line, such as RobustBench's list of 5,000.
        num_per_class: Without a list, the number of images to take from each class, the first ones by name.
        order: "shuffle", "name" (by path, so class by class) or "time" (of the last modification). By default that of
            the list, and without a list "shuffle", the same in every domain.
        seed: Seed of the shuffle, which depends on nothing else but the names of the images.
        double_resize: Whether to resize to 256 and crop 224 once more, as the authors' code does.

    Raises:
        ConfigError: Both ``images`` and ``num_per_class`` or ``order`` are given, or there is no such order.
        DataError: The list cannot be read.
    """

    read_ahead = READ_AHEAD

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        images: str | PathLike[str] | None = None,
        num_per_class: int | None = None,
        order: Order | None = None,
        seed: int = 0,
        double_resize: bool = False,
    ) -> None:
        self.folder, self.num_per_class = Path(folder), num_per_class
        self.images = None if images is None else _read_image_list(Path(images))
        check_selection(num_per_class, self.images)
        check_order(order)
        if order is not None and self.images is not None:
            raise ConfigError(f"give images or order, not both: order={order!r} does not apply to a list")
        self.order, self.seed = order or "shuffle", check_integer("seed", seed)
        self.transform = resize_and_center_crop if double_resize else None
        self.name = "imagenet-c" + (" double-resized" if double_resize else "")
        # The first domain that was opened, its entries, and the hint if one of them is missing.
        self._reference: tuple[Path, list[Path], str] | None = None

    def domain(self, corruption: str, severity: float) -> ImageFiles:
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, which is that of its folder.
            severity: 1 (weak) to 5 (strong), or a fraction that ``ctta corrupt`` has written.

        Returns:
            The images, which are decoded when they are read.

        Raises:
            DataError: The folder is missing, or its images differ from those of the first domain.
        """
        if corruption == CLEAN:
            raise no_clean_images(self.folder, "image_folder(path, size=(224, 224))")
        subfolder = Path(corruption) / str(check_severity(severity))
        # ctta.data.datasets.download leaves each group in its own folder; people often merge the groups.
        candidates = [self.folder, *(self.folder / name for name in list_folders(self.folder))]
        group = next((candidate for candidate in candidates if (candidate / subfolder).is_dir()), None)
        if group is None:
            expected = self.folder / GROUP_OF.get(corruption, corruption)
            raise DataError(
                f"{self.folder / subfolder} is missing, and so is {expected / subfolder}: {_hint(corruption, expected)}"
            )
        root = group / subfolder
        hint = _hint(corruption, group / corruption if group == self.folder else group)
        images = find_labeled_images(
            root,
            self.transform,
            self.name,
            num_per_class=self.num_per_class,
            images=self.images,
            order=self.order,
            seed=self.seed,
            hint=hint,
        )
        # The class folders too: with a list of images, a missing folder would shift the labels unnoticed.
        entries = [*map(Path, list_folders(root)), *(path.relative_to(root) for path in images.paths)]
        self._check_entries(root, entries, hint)
        return images

    def _check_entries(self, root: Path, entries: list[Path], hint: str) -> None:
        """Raise unless a domain has the same entries as the first, which finds incompletely extracted folders."""
        first_root, expected, first_hint = self._reference = self._reference or (root, entries, hint)
        if different := sorted(set(expected) ^ set(entries)):
            complete, incomplete = first_root, root
            if different[0] not in set(expected):
                complete, incomplete, hint = root, first_root, first_hint
            more = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
            raise DataError(f"{incomplete / different[0]} is missing, but {complete} has it{more}: {hint}")


def _read_image_list(path: Path) -> list[str]:
    """Return the nonempty lines of a text file."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the list of images {path} cannot be read ({error}); expected a text file with one "
            "<class>/<image>.JPEG per line: check the path, or use num_per_class= instead"
        ) from error
    if not any(lines):
        raise DataError(f"{path} lists no images; expected one <class>/<image>.JPEG per line")
    return [line for line in lines if line]


def _hint(corruption: str, folder: Path) -> str:
    """Return what to do about a missing corruption; ``folder`` has to be deleted before its group is downloaded."""
    if corruption not in GROUP_OF:
        return f"ImageNet-C has no {corruption}; check the name, or create your own: ctta corrupt SRC DST"
    download = suggest_download(folder, f"imagenet-c/{GROUP_OF[corruption]}")
    return f"{download}, or create your own: ctta corrupt SRC DST"
