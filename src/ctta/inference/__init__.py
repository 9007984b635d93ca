"""Adapt to a folder of images, resumably."""

from ctta.inference.folder import InferenceSummary, adapt_folder

__all__ = ["InferenceSummary", "adapt_folder"]
