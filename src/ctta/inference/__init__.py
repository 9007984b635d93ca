"""Adapt to a folder of images, resumably."""

from ctta.inference.folder import InferenceSummary, adapt_folder
from ctta.inference.run import NormalizedBatches

__all__ = ["InferenceSummary", "NormalizedBatches", "adapt_folder"]
