"""Pillow, imported only where a picture file is read or written."""

from types import ModuleType


def pillow_image() -> ModuleType:
    """The module PIL.Image, or an error that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("this needs Pillow, which is not installed: pip install 'ctta[data]'") from error
    return Image
