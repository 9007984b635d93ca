"""Image files: access to Pillow, which files count as images, and the center crop of ImageNet."""

import struct
from pathlib import Path
from types import ModuleType
from typing import Any

IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def import_pillow() -> ModuleType:
    """Import and return the module ``PIL.Image``.

    Pillow is an optional dependency, so it is imported only where an image file is read or written.

    Returns:
        The module ``PIL.Image``.

    Raises:
        ImportError: Pillow is not installed; the message names the extra that installs it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("this needs Pillow, which is not installed: pip install 'ctta[data]'") from error
    return Image


def decoding_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that Pillow raises for a file that is missing, damaged or not an image.

    Its parsers do not convert the errors of the code they call, hence the length of the list.
    """
    bomb = import_pillow().DecompressionBombError
    return (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, bomb)


def resize_and_center_crop(image: Any, *, resize: int = 256, crop: int = 224) -> Any:
    """Resize the shorter side of an image and crop a square from its center, as ImageNet is preprocessed.

    Args:
        image: A PIL image.
        resize: Length of the shorter side after resizing, in pixels.
        crop: Side of the square, in pixels.

    Returns:
        A PIL image of ``crop`` x ``crop`` pixels.
    """
    width, height = (resize * length // min(image.size) for length in image.size)
    image = image.resize((width, height), import_pillow().Resampling.BILINEAR)
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    return image.crop((left, top, left + crop, top + crop))


def is_hidden_folder(name: str) -> bool:
    """Return whether a folder of this name is hidden or temporary: ``.trash``, ``.noise.unpacking``, ``__MACOSX``."""
    return name.startswith((".", "__"))


def is_image_file(path: Path, root: Path) -> bool:
    """Return whether a file below ``root`` has the suffix of an image and is not hidden.

    Desktops and archives leave hidden files behind: macOS writes ``._a.png``, which has the suffix of an image and is
    none. Folders above ``root`` are not looked at, as a cache is often a hidden folder.

    Args:
        path: The file, below ``root``.
        root: The folder that is searched.

    Returns:
        Whether the file is to be read as an image.
    """
    *folders, name = path.relative_to(root).parts
    is_hidden = name.startswith(".") or any(map(is_hidden_folder, folders))
    return not is_hidden and path.suffix.lower() in IMAGE_SUFFIXES
