"""Adapt to a folder of images or to a video, resumably."""

from ctta.adapt.folder import adapt_folder
from ctta.adapt.run import InferenceSummary, NormalizedBatches
from ctta.adapt.video import adapt_video

__all__ = ["InferenceSummary", "NormalizedBatches", "adapt_folder", "adapt_video"]
