"""Adapt to a folder of images or to a video, resumably."""

from ctta.inference.blending import NormalizedBatches
from ctta.inference.folder import adapt_folder
from ctta.inference.summary import InferenceSummary
from ctta.inference.video import adapt_video

__all__ = ["InferenceSummary", "NormalizedBatches", "adapt_folder", "adapt_video"]
