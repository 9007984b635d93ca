"""ImageNet-C in its published format."""

from os import PathLike
from pathlib import Path

from ctta.core.validation import check_integer
from ctta.data.corruptions.registry import check_severity
from ctta.data.datasets.base import no_clean_images
from ctta.data.datasets.cache import suggest_download
from ctta.data.datasets.corruptible import CLEAN
from ctta.data.datasets.image_files import READ_AHEAD, ImageFiles, check_selection, find_labeled_images, list_folders
from ctta.data.datasets.image_order import Order, check_order
from ctta.errors import ConfigError, DataError
from ctta.io.images import resize_and_center_crop

#: The archives in which ImageNet-C is published, and the corruptions in each.
GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "spatter", "gaussian_blur", "saturate"),
}
GROUP_OF = {corruption: group for group, corruptions in GROUPS.items() for corruption in corruptions}


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
