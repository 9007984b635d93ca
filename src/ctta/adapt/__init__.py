"""Adapt to a folder of images or to a video, resumably; detectors to a video."""

from ctta.adapt.boxes import BoxSummary, adapt_video_boxes
from ctta.adapt.folder import adapt_folder
from ctta.adapt.run import InferenceSummary, NormalizedBatches
from ctta.adapt.video import adapt_video

__all__ = [
    "BoxSummary",
    "InferenceSummary",
    "NormalizedBatches",
    "adapt_folder",
    "adapt_video",
    "adapt_video_boxes",
]
