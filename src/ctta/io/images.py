"""Image files: access to Pillow, which files count as images, and how they become pixels."""

import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.errors import ConfigError, InputError

IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def import_pillow() -> ModuleType:
    """Import and return ``PIL.Image``, an optional dependency, where an image file is read or written."""
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


def to_upright_rgb(image: Any, name: str) -> Any:
    """Convert a PIL image to what a person sees, in RGB: upright, without alpha, gray repeated, 16 bits reduced to 8.

    Phones store the rows of the sensor and an EXIF tag that says how to rotate them. This applies to all images:
    ImageNet-C is not expected to have such tags, and torchvision's loaders, which ignore them, would differ only where
    there are some.

    Raises:
        InputError: The image has 32 bits per value, whose range is unknown; the message calls it ``name``.
    """
    from PIL import ImageOps

    if image.mode in ("I", "F"):
        raise InputError(f"{name} has 32 bits per value, whose range is unknown: store it with 8 or 16 bits")
    image.load()
    with suppress(SyntaxError):  # an unreadable tag is ignored
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would clip these rather than scale them
        image = import_pillow().fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # or Pillow warns
        image = image.convert("RGBA")
    return image.convert("RGB")


def to_unit_floats(pixels: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 images (N, H, W, 3) to floats (N, 3, H, W) in [0, 1]; the result is in channels-last memory."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255)


@dataclass(frozen=True)
class Resize:
    """Bilinear resize of a PIL image to (height, width); a class, as streams with a closure could not be pickled."""

    size: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ConfigError(f"images cannot be resized to {self.size}; expected a positive height and width")

    def __call__(self, image: Any) -> Any:
        """Return the resized image."""
        height, width = self.size
        return image.resize((width, height), import_pillow().Resampling.BILINEAR)


def resize_and_center_crop(image: Any, *, resize: int = 256, crop: int = 224) -> Any:
    """Resize the shorter side of a PIL image and crop a square from its center, as ImageNet is preprocessed."""
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
    """
    *folders, name = path.relative_to(root).parts
    is_hidden = name.startswith(".") or any(map(is_hidden_folder, folders))
    return not is_hidden and path.suffix.lower() in IMAGE_SUFFIXES
