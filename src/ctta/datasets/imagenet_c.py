"""Folders of pictures: the user's own, ImageFolder-shaped trees, and ImageNet-C."""

from os import PathLike
from pathlib import Path

from ctta.datasets.hints import GROUP_OF, for_imagenet_c
from ctta.datasets.image_files import (
    READ_AHEAD,
    ImageFiles,
    check_image_choice,
    find_labeled_images,
    list_folders,
    read_image_list,
)
from ctta.errors import DataError
from ctta.io.images import resize_and_center_crop
from ctta.validation import check_integer


class ImageNetC:
    """The published tree ``<corruption>/<severity>/<class>/<picture>.JPEG``, already 224x224.

    The label of a class is its place among the class folders that are there, sorted by name: those of all 1,000 classes
    make ImageNet's labels. Every domain must have the same.

    Args:
        folder: the root; the archives' groups (noise, blur, ...) extracted into it, or each into a folder of its own,
            as ``ctta.datasets.download("imagenet-c/noise").parent`` has them.
        images: a text file with one ``<class>/<picture>.JPEG`` per line, such as RobustBench's list of 5,000.
        per_class: without a list, the first so many pictures of each class.
        double_resize: resize to 256 and crop 224 once more, as the authors' code does.
    """

    read_ahead = READ_AHEAD

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        images: str | PathLike[str] | None = None,
        per_class: int | None = None,
        double_resize: bool = False,
    ) -> None:
        self.folder, self.per_class = Path(folder), per_class
        self.images = None if images is None else read_image_list(Path(images))
        check_image_choice(per_class, self.images)
        self.transform = resize_and_center_crop if double_resize else None
        self.name = "imagenet-c" + (" double-resized" if double_resize else "")
        # The first domain opened, what it holds, and what to do if it lacks something.
        self._first: tuple[Path, list[Path], str] | None = None

    def domain(self, corruption: str, severity: int) -> ImageFiles:
        within = Path(corruption) / str(check_integer("severity", severity, 1, 5))
        # ctta.datasets.download leaves each group in a folder of its own, people often take the groups apart.
        groups = [self.folder, *(self.folder / name for name in list_folders(self.folder))]
        group = next((group for group in groups if (group / within).is_dir()), None)
        if group is None:
            own = self.folder / GROUP_OF.get(corruption, corruption)
            raise DataError(
                f"{self.folder / within} is missing, as is {own / within} in a folder of its group: "
                f"{for_imagenet_c(corruption, own)}"
            )
        root, remedy = group / within, for_imagenet_c(corruption, group / corruption if group == self.folder else group)
        pictures = find_labeled_images(
            root, self.transform, self.name, per_class=self.per_class, images=self.images, remedy=remedy
        )
        # The class folders too: with a list of pictures, one that is missing would shift labels and go unnoticed.
        holds = [*map(Path, list_folders(root)), *(path.relative_to(root) for path in pictures.paths)]
        self._check_like_the_first(root, holds, remedy)
        return pictures

    def _check_like_the_first(self, root: Path, holds: list[Path], remedy: str) -> None:
        """Every domain shows the same pictures, or labels would shift and half-extracted folders go unnoticed."""
        first_root, expected, first_remedy = self._first = self._first or (root, holds, remedy)
        if different := sorted(set(expected) ^ set(holds)):
            there, not_there = first_root, root
            if different[0] not in set(expected):
                there, not_there, remedy = root, first_root, first_remedy
            more = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
            raise DataError(f"{not_there / different[0]} is missing, which {there} has{more}: {remedy}")
