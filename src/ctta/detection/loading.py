"""Detectors by name, as commands take them."""

from collections.abc import Callable
from functools import partial

from torch import nn

from ctta.detection.detector import Detector
from ctta.detection.libraries import as_detector
from ctta.detection.streets import street_detector
from ctta.detection.yolov5 import load_yolov5
from ctta.models.pretrained import import_library, load_huggingface, load_python_file
from ctta.models.registry import choose_form


def load_detector(spec: str) -> Detector:
    """Load a detector by name.

    ==============================  ================================================================================
    ``streets``                     the small one of cars and people on drawn streets, which ships with the library
    ``yolov5:PATH``                 released weights, of which nothing is executed, see :func:`load_yolov5`
    ``ultralytics:PATH``            a file that ``ultralytics.YOLO`` reads; it may execute code of the file
    ``hf:NAME``                     a DETR, RT-DETR, YOLOS or alike of transformers, or a local folder of one
    ``torchvision:NAME``            a network of ``torchvision.models.detection`` with its default weights
    ``file:PATH.py:function``       a function of your own, which returns any detector; the file is executed
    ==============================  ================================================================================

    Args:
        spec: Name of the detector, in one of the forms of the table.

    Returns:
        The detector, in eval mode on the CPU.

    Raises:
        ConfigError: No detector has this name.
        ImportError: The library that provides it is not installed.

    >>> load_detector("streets").num_classes
    2
    """
    form, argument = choose_form(spec, DETECTOR_LOADERS)
    return as_detector(DETECTOR_LOADERS[form](argument).eval()).eval()


def _load_ultralytics(path: str) -> nn.Module:
    net: nn.Module = import_library("ultralytics").YOLO(path).model
    return net


def _load_torchvision(name: str) -> nn.Module:
    net: nn.Module = import_library("torchvision.models").get_model(name, weights="DEFAULT")
    return net


#: Form of a name to its loader, as in :data:`ctta.models.LOADERS`.
DETECTOR_LOADERS: dict[str, Callable[[str], nn.Module]] = {
    "streets": lambda _: street_detector(),
    "yolov5:PATH": load_yolov5,
    "ultralytics:PATH": _load_ultralytics,
    "hf:NAME": partial(load_huggingface, auto_class="AutoModelForObjectDetection"),
    "torchvision:NAME": _load_torchvision,
    "file:PATH.py:function": load_python_file,
}
