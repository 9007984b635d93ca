"""Folders of pictures: the user's own, ImageFolder-shaped trees, and ImageNet-C."""

import operator
from collections.abc import Sequence
from os import PathLike
from pathlib import Path, PurePosixPath

import numpy as np

from ctta.corruptions.imaging import centre_cropped
from ctta.streams.errors import DataError
from ctta.streams.pictures import PictureFiles, Transform, listing_name, pictures_below, resized
from ctta.streams.stream import Segment, Stream

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
    segment = Segment(name or root.name, pictures, np.arange(len(paths)))
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
    """A tree ``<class>/<picture>``; the label of a class is its place among the sorted class names.

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
    segment = Segment(name or root.name, pictures, np.arange(len(pictures)))
    return Stream(f"image_folder {pictures.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def labelled_pictures(
    root: Path, transform: Transform | None, name: str, *, per_class: int | None, images: Sequence[str] | None
) -> PictureFiles:
    """What :func:`image_folder` gives, before it is a stream; `name` says what the transform does."""
    check_choice(per_class, images)
    folders = [child.name for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    classes = sorted(folder for folder in folders if not folder.startswith((".", "__")))  # no .cache, no __MACOSX
    if not classes:
        raise DataError(f"{root} holds no class folders; expected <class>/<picture>: extract the archive again")
    if images is not None:
        chosen = [root / entry for entry in images]
        if missing := [entry for entry, file in zip(images, chosen, strict=True) if not file.is_file()]:
            raise DataError(f"{root / missing[0]} is missing, and {len(missing) - 1} more of the list of images")
    else:
        chosen = [file for folder in classes for file in pictures_below(root / folder)[:per_class]]
    places = {folder: place for place, folder in enumerate(classes)}
    labels = np.array([places[file.relative_to(root).parts[0]] for file in chosen])
    return PictureFiles(listing_name(root, chosen, f"{name} {classes}"), tuple(chosen), labels, transform)


def check_choice(per_class: int | None, images: Sequence[str] | None) -> None:
    """Whether it is clear which pictures are meant."""
    if per_class is not None and images is not None:
        raise ValueError(f"give per_class or images, not both: per_class={per_class} would not apply to the list")
    if per_class is not None and operator.index(per_class) < 1:
        raise ValueError(f"per_class must be at least 1, or None for all pictures, got {per_class}")
    if images is not None:
        if isinstance(images, str) or not images:
            raise ValueError(f"images must be a list of '<class>/<picture>' with at least one entry, got {images!r}")
        for entry in images:
            parts = PurePosixPath(entry).parts
            if len(parts) < 2 or ".." in parts or entry.startswith(("/", ".", "__")):
                raise ValueError(f"images must be of the form '<class>/<picture>' below the tree's root, got {entry!r}")


class ImageNetC:
    """The published tree ``<corruption>/<severity>/<class>/<picture>.JPEG``, already 224x224.

    Args:
        folder: the root; the archives' groups (noise, blur, ...) extracted into it, or each into a folder of its own,
            as ``ctta.data.get("imagenet-c/noise").parent`` has them.
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
        lines = None if images is None else Path(images).read_text().splitlines()
        self.images = None if lines is None else [line.strip() for line in lines if line.strip()]
        if images is not None and not self.images:
            raise DataError(f"{images} lists no pictures; expected one <class>/<picture>.JPEG per line")
        check_choice(per_class, self.images)
        self.transform = centre_cropped if double_resize else None
        self.name = "imagenet-c" + (" double-resized" if double_resize else "")
        self._first: tuple[Path, list[Path]] | None = None  # the first domain opened, and what it holds

    def domain(self, corruption: str, severity: int) -> PictureFiles:
        within = Path(corruption) / str(severity)
        # ctta.data.get leaves each group in a folder of its own, people often take the groups apart.
        places = [self.folder / within, *(group / within for group in sorted(self.folder.glob("*/")))]
        root = next((place for place in places if place.is_dir()), None)
        if root is None:
            raise DataError(
                f"{places[0]} is missing, also in folders of groups such as {self.folder / 'noise' / within}: "
                f"fetch the group that holds {corruption} with ctta.data.get"
            )
        pictures = labelled_pictures(root, self.transform, self.name, per_class=self.per_class, images=self.images)
        self._check_like_the_first(root, [path.relative_to(root) for path in pictures.paths])
        return pictures

    def _check_like_the_first(self, root: Path, holds: list[Path]) -> None:
        """Every domain shows the same pictures, or labels would shift and half-extracted folders go unnoticed."""
        first_root, expected = self._first = self._first or (root, holds)
        if different := sorted(set(expected) ^ set(holds)):
            there, not_there = (first_root, root) if different[0] in set(expected) else (root, first_root)
            raise DataError(
                f"{not_there / different[0]} is missing, which {there} has, and {len(different) - 1} more differ: "
                "extract the archive again"
            )
