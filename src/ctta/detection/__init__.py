"""Object detectors that adapt: the interface of a detector, adapters to other libraries, methods and boxes."""

from ctta.detection.actmad import ActMAD
from ctta.detection.boxes import Boxes, Letterbox, box_iou, fuse_boxes, letterbox, pack, suppress, unpack
from ctta.detection.cotta import BoxCoTTA
from ctta.detection.datasets import (
    CITYSCAPES_BOX_CLASSES,
    corrupt_stream,
    find_labeled_images,
    read_cityscapes,
    read_coco,
    read_yolo,
)
from ctta.detection.detector import Detector
from ctta.detection.libraries import TorchvisionDetector, TransformersDetector, UltralyticsDetector, as_detector
from ctta.detection.loading import load_detector
from ctta.detection.model import DetectionModel
from ctta.detection.registry import DEFAULT_DETECTION_METHOD, DETECTION_METHODS, detect
from ctta.detection.source_stats import detection_stats
from ctta.detection.statistics import BNStatsDetector, ShiftStatisticsDetector, SourceDetector
from ctta.detection.streets import draw_street_batches, street_detector
from ctta.detection.whw import WHW
from ctta.detection.yolov5 import YOLOv5, YOLOv5Detector, load_yolov5

__all__ = [
    "CITYSCAPES_BOX_CLASSES",
    "DEFAULT_DETECTION_METHOD",
    "DETECTION_METHODS",
    "WHW",
    "ActMAD",
    "BNStatsDetector",
    "BoxCoTTA",
    "Boxes",
    "DetectionModel",
    "Detector",
    "Letterbox",
    "ShiftStatisticsDetector",
    "SourceDetector",
    "TorchvisionDetector",
    "TransformersDetector",
    "UltralyticsDetector",
    "YOLOv5",
    "YOLOv5Detector",
    "as_detector",
    "box_iou",
    "corrupt_stream",
    "detect",
    "detection_stats",
    "draw_street_batches",
    "find_labeled_images",
    "fuse_boxes",
    "letterbox",
    "load_detector",
    "load_yolov5",
    "pack",
    "read_cityscapes",
    "read_coco",
    "read_yolo",
    "street_detector",
    "suppress",
    "unpack",
]
