"""Adapt to a folder of one's own pictures, and go on with it later."""

from ctta.inference.folder import Adapted, adapt_to_folder

__all__ = ["Adapted", "adapt_to_folder"]
