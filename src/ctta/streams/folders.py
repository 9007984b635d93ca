"""Folders of pictures: the user's own, ImageFolder-shaped trees, and ImageNet-C."""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path, PurePosixPath

import numpy as np

from ctta.errors import DataError
from ctta.io.images import is_hidden_folder, resize_and_center_crop
from ctta.streams.pictures import PictureFiles, Transform, listing_name, pictures_below, resized
from ctta.streams.remedies import GROUP_OF, for_imagenet_c
from ctta.streams.stream import Segment, Stream
from ctta.validation import check_integer

READ_AHEAD = 2


def folder(
    path: str | PathLike[str], *, size: tuple[int, int] | None = None, batch_size: int = 32, name: str | None = None
) -> Stream:
    """The pictures of a folder and below, in the order of their paths, without labels: a camera's own dump.

    Args:
        path: the folder.
        size: (height, width) to resize to; without, pictures of one batch must be of one size.
        batch_size: pictures per batch.
        name: of the domain; by default the folder's.
    """
    root = Path(path)
    paths = pictures_below(root)
    pictures = PictureFiles(listing_name(root, paths, str(size)), tuple(paths), None, resized(size) if size else None)
    segment = Segment(name or own_name(root), pictures, np.arange(len(paths)))
    return Stream(f"folder {pictures.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def image_folder(
    path: str | PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    transform: Transform | None = None,
    transform_name: str = "",
    per_class: int | None = None,
    images: Sequence[str] | None = None,
    batch_size: int = 32,
    name: str | None = None,
) -> Stream:
    """A tree ``<class>/<picture>``; the label of a class is its place among the folders that are there, sorted by name.

    So a missing class shifts the labels of those after it; an empty folder with its name keeps its place, if ``images``
    says which pictures to take.

    Args:
        path: the root of the tree.
        size: (height, width) to resize to; without, pictures of one batch must be of one size.
        transform: instead of a size, what to do with each picture, PIL image to PIL image.
        transform_name: what the transform does, in a word, so that the stream's hash can tell.
        per_class: only the first so many of each class, by name.
        images: instead, only these ``<class>/<picture>``, in this order.
        batch_size: pictures per batch.
        name: of the domain; by default the folder's.
    """
    root = Path(path)
    if (transform is None) == bool(transform_name):
        raise ValueError("give a transform and its name together, such as transform_name='crop 224', for the hash")
    if size and transform:
        raise ValueError("give size or transform, not both: the transform can resize too")
    pictures = labelled_pictures(
        root, resized(size) if size else transform, str(size or transform_name), per_class=per_class, images=images
    )
    segment = Segment(name or own_name(root), pictures, np.arange(len(pictures)))
    return Stream(f"image_folder {pictures.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def own_name(root: Path) -> str:
    """What a folder is called, also where it was given as '.'; not resolved, as a link has a name of its own."""
    return os.path.basename(os.path.abspath(root)) or str(root)


def visible_folders(root: Path) -> list[str]:
    """The folders in a folder by name, without .cache, __MACOSX and what a killed unpacking left."""
    children = [child.name for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    return sorted(name for name in children if not is_hidden_folder(name))


def labelled_pictures(
    root: Path,
    transform: Transform | None,
    name: str,
    *,
    per_class: int | None,
    images: Sequence[str] | None,
    remedy: str = "extract the archive again",
) -> PictureFiles:
    """What :func:`image_folder` gives, before it is a stream; `name` says what the transform does."""
    check_choice(per_class, images)
    classes = visible_folders(root)
    if not classes:
        raise DataError(f"{root} holds no class folders; expected <class>/<picture>: {remedy}")
    if images is not None:
        chosen = [root / entry for entry in images]
        if missing := [file for file in chosen if not file.is_file()]:
            more = f", and {len(missing) - 1} more of the list of images" if len(missing) > 1 else ""
            raise DataError(f"{missing[0]} is missing{more}: correct the list, or {remedy}")
    else:
        chosen = [file for folder in classes for file in pictures_below(root / folder, remedy)[:per_class]]
    places = {folder: place for place, folder in enumerate(classes)}
    labels = np.array([places[file.relative_to(root).parts[0]] for file in chosen])
    return PictureFiles(listing_name(root, chosen, f"{name} {classes}"), tuple(chosen), labels, transform)


def check_choice(per_class: int | None, images: Sequence[str] | None) -> None:
    """Whether it is clear which pictures are meant."""
    if per_class is not None and images is not None:
        raise ValueError(f"give per_class or images, not both: per_class={per_class} would not apply to the list")
    if per_class is not None:
        check_integer("per_class (None for all pictures)", per_class, 1)
    if images is not None:
        if isinstance(images, str) or not images:
            raise ValueError(f"images must be a list of '<class>/<picture>' with at least one entry, got {images!r}")
        for entry in images:
            parts = PurePosixPath(entry).parts
            if len(parts) < 2 or ".." in parts or entry.startswith(("/", ".", "__")):
                raise ValueError(f"images must be of the form '<class>/<picture>' below the tree's root, got {entry!r}")


class ImageNetC:
    """The published tree ``<corruption>/<severity>/<class>/<picture>.JPEG``, already 224x224.

    The label of a class is its place among the class folders that are there, sorted by name: those of all 1,000 classes
    make ImageNet's labels. Every domain must have the same.

    Args:
        folder: the root; the archives' groups (noise, blur, ...) extracted into it, or each into a folder of its own,
            as ``ctta.datasets.get("imagenet-c/noise").parent`` has them.
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
        self.images = None if images is None else listed_pictures(Path(images))
        check_choice(per_class, self.images)
        self.transform = resize_and_center_crop if double_resize else None
        self.name = "imagenet-c" + (" double-resized" if double_resize else "")
        # The first domain opened, what it holds, and what to do if it lacks something.
        self._first: tuple[Path, list[Path], str] | None = None

    def domain(self, corruption: str, severity: int) -> PictureFiles:
        within = Path(corruption) / str(check_integer("severity", severity, 1, 5))
        # ctta.datasets.get leaves each group in a folder of its own, people often take the groups apart.
        groups = [self.folder, *(self.folder / name for name in visible_folders(self.folder))]
        group = next((group for group in groups if (group / within).is_dir()), None)
        if group is None:
            own = self.folder / GROUP_OF.get(corruption, corruption)
            raise DataError(
                f"{self.folder / within} is missing, as is {own / within} in a folder of its group: "
                f"{for_imagenet_c(corruption, own)}"
            )
        root, remedy = group / within, for_imagenet_c(corruption, group / corruption if group == self.folder else group)
        pictures = labelled_pictures(
            root, self.transform, self.name, per_class=self.per_class, images=self.images, remedy=remedy
        )
        # The class folders too: with a list of pictures, one that is missing would shift labels and go unnoticed.
        holds = [*map(Path, visible_folders(root)), *(path.relative_to(root) for path in pictures.paths)]
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


def listed_pictures(path: Path) -> list[str]:
    """The lines of a text file with a picture on each."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the list of images {path} cannot be read ({error}); expected a text file with one "
            "<class>/<picture>.JPEG per line: check the path, or use per_class= instead"
        ) from error
    if not any(lines):
        raise DataError(f"{path} lists no pictures; expected one <class>/<picture>.JPEG per line")
    return [line for line in lines if line]
