"""Adapt to a folder of images, resumably."""

from ctta.inference.blending import NormalizedBatches
from ctta.inference.folder import InferenceSummary, adapt_folder

__all__ = ["InferenceSummary", "NormalizedBatches", "adapt_folder"]
