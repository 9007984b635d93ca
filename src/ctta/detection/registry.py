"""The methods for detectors by name."""

from typing import Any

from torch import nn

from ctta.core.validation import check_choice
from ctta.detection.actmad import ActMAD
from ctta.detection.cotta import BoxCoTTA
from ctta.detection.model import DetectionModel
from ctta.detection.statistics import BNStatsDetector, ShiftStatisticsDetector, SourceDetector
from ctta.detection.whw import WHW

#: Every method for detectors by its name.
DETECTION_METHODS: dict[str, type[DetectionModel]] = {
    "source": SourceDetector,
    "bn_stats": BNStatsDetector,
    "shift_statistics": ShiftStatisticsDetector,
    "actmad": ActMAD,
    "cotta": BoxCoTTA,
    "whw": WHW,
}
#: The method of :func:`detect` unless the user names one.
DEFAULT_DETECTION_METHOD = "shift_statistics"


def detect(detector: nn.Module, method: str = DEFAULT_DETECTION_METHOD, **hyperparameters: Any) -> DetectionModel:
    """Let an object detector adapt while it is used.

    Args:
        detector: A network for object detection of torchvision, transformers or Ultralytics, a
            :class:`ctta.detection.YOLOv5`, a :class:`ctta.detection.Detector`, or a module with the functions
            ``predict``, ``loss`` and ``features``; it is copied and never changed.
        method: One of :data:`ctta.detection.DETECTION_METHODS`.
        **hyperparameters: Keyword arguments of the method.

    Returns:
        A model that predicts and adapts when it is called on images (N, 3, H, W) in [0, 1]; it answers a list with
        ``boxes`` (left, top, right and bottom in pixels), ``scores`` and ``labels`` for each image.

    Raises:
        ConfigError: There is no such method, or the network is no detector.

    >>> import torch
    >>> from ctta.detection import YOLOv5
    >>> model = detect(YOLOv5(num_classes=3, width=0.125))
    >>> [found] = model(torch.rand(1, 3, 64, 96))    # predicts and adapts
    >>> sorted(found)
    ['boxes', 'labels', 'scores']
    """
    check_choice("method", method, tuple(DETECTION_METHODS))
    return DETECTION_METHODS[method](detector, **hyperparameters)
