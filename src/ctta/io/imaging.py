"""Pillow, imported only where a picture file is read or written."""

import struct
from types import ModuleType
from typing import Any


def pillow_image() -> ModuleType:
    """The module PIL.Image, or an error that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("this needs Pillow, which is not installed: pip install 'ctta[data]'") from error
    return Image


def decoding_errors() -> tuple[type[Exception], ...]:
    """What Pillow raises for a file that is missing, damaged or no picture: its parsers fail in many ways."""
    bomb = pillow_image().DecompressionBombError
    return (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, bomb)


def centre_cropped(picture: Any, *, shorter: int = 256, side: int = 224) -> Any:
    """A PIL image with its shorter side resized and a square cut from its middle, as ImageNet is prepared."""
    width, height = (shorter * length // min(picture.size) for length in picture.size)
    picture = picture.resize((width, height), pillow_image().Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return picture.crop((left, top, left + side, top + side))
