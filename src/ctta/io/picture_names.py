"""Which files of a folder are its pictures, by their names."""

from pathlib import Path

PICTURE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def is_hidden_folder(name: str) -> bool:
    """Whether a folder is not for people to see: .trash, .noise.unpacking, __MACOSX."""
    return name.startswith((".", "__"))


def is_picture(path: Path, root: Path) -> bool:
    """Whether a file below `root` is a picture that somebody put there, by its suffix.

    Desktops and archives leave others: a Mac's ``._a.png`` has the suffix of a picture and is none. What lies above
    `root` does not matter, as a cache folder is often a hidden one.
    """
    *folders, name = path.relative_to(root).parts
    hidden = name.startswith(".") or any(map(is_hidden_folder, folders))
    return not hidden and path.suffix.lower() in PICTURE_SUFFIXES
