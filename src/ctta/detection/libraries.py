"""Detectors of other libraries behind one interface: transformers, torchvision and Ultralytics."""

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import read
from ctta.detection.boxes import Boxes, box_area, choose_boxes, letterbox, move_boxes, select_boxes
from ctta.detection.detector import Detector, GivenDetector
from ctta.detection.yolov5 import YOLOv5, YOLOv5Detector
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32
from ctta.nn.surgery import unwrap

_FUNCTIONS = ("predict", "loss", "features")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: The buffers of a BatchNorm that torchvision, transformers or detectron2 have frozen.
_FROZEN_BUFFERS = {"weight", "bias", "running_mean", "running_var"}
#: The strides that the finest map of a network of transformers may have.
_STRIDES = (4, 8, 16, 32, 64)
#: What transformers' frozen BatchNorms, which do not say it, add to the variance.
_FROZEN_EPS = 1e-5
#: The weights of box, class and distribution in the loss of Ultralytics, unless the network says otherwise.
_ULTRALYTICS_GAINS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}


def as_detector(net: nn.Module, **settings: Any) -> Detector:
    """Return a network as a :class:`Detector`, whichever library it is from.

    Frozen BatchNorms of torchvision, transformers and detectron2 are layers of their own, which no method would
    recognize. In a copy of the network they become ``nn.BatchNorm2d`` in eval mode, which compute the same, and whose
    scales and shifts stay frozen.

    Args:
        net: A :class:`Detector`, a :class:`ctta.detection.YOLOv5`, a network for object detection
            of transformers, torchvision or Ultralytics (its ``YOLO`` object too), or a module with the functions
            ``predict``, ``loss`` and ``features``.
        **settings: Arguments of the class that it is wrapped in, such as ``size=640``.

    Returns:
        The detector, around the same network or around a copy of it.

    Raises:
        ConfigError: It is none of these.
    """
    return _thaw(_wrap(net, settings))


def _wrap(net: nn.Module, settings: dict[str, Any]) -> Detector:
    if type(net).__module__.startswith("ultralytics") and isinstance(inner := getattr(net, "model", None), nn.Module):
        net = inner if hasattr(inner, "loss") else net  # the object YOLO holds the network
    net = unwrap(net) if isinstance(net, nn.Module) else net
    if isinstance(net, Detector):
        return net
    if isinstance(net, YOLOv5):
        return YOLOv5Detector(net, **settings)
    if hasattr(net, "roi_heads") or hasattr(net, "compute_loss"):
        return TorchvisionDetector(net, **settings)
    if hasattr(net, "config") and hasattr(net.config, "id2label"):
        return TransformersDetector(net, **settings)
    if all(callable(getattr(net, name, None)) for name in _FUNCTIONS):
        return GivenDetector(net, **settings)
    if hasattr(net, "loss") and hasattr(net, "args") and isinstance(getattr(net, "model", None), nn.Module):
        return UltralyticsDetector(net, **settings)
    raise ConfigError(
        f"{type(net).__name__} is not a known detector: expected one of torchvision, transformers or Ultralytics, a "
        "ctta.detection.YOLOv5, or a torch.nn.Module with the functions predict, loss and features"
    )


def _thaw(detector: Detector) -> Detector:
    """Return a detector without frozen BatchNorms: itself, or a copy with BatchNorms in their places."""
    frozen = [name for name, module in detector.named_modules() if _is_frozen_norm(module)]
    if not frozen:
        return detector
    with torch.inference_mode(False):  # or the copies would be inference tensors, which cannot be trained
        detector = copy.deepcopy(detector)
    for name in frozen:
        parent, _, child = name.rpartition(".")
        setattr(detector.get_submodule(parent), child, _make_norm(detector.get_submodule(name)))
    return detector


def _is_frozen_norm(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return names == _FROZEN_BUFFERS and not any(True for _ in module.parameters())


def _make_norm(frozen: nn.Module) -> nn.BatchNorm2d:
    buffers = dict(frozen.named_buffers())
    norm = nn.BatchNorm2d(len(buffers["weight"]), eps=getattr(frozen, "eps", _FROZEN_EPS)).to(buffers["weight"])
    norm.load_state_dict(buffers, strict=False)  # a frozen one counts no batches
    return norm.requires_grad_(False).eval()


def _to_fractions(boxes: Tensor, size: Tensor) -> Tensor:
    """Return center, width and height as fractions of a size (width, height) from corners in pixels."""
    low, high = boxes[:, :2], boxes[:, 2:]
    return torch.cat([(low + high) / 2, high - low], 1) / size.repeat(2)


class TransformersDetector(Detector):
    """A DETR, Deformable DETR, RT-DETR, YOLOS or alike of transformers.

    Images are resized without keeping their shape, so that boxes as fractions of a side need no further mapping.

    Args:
        net: The network, such as ``AutoModelForObjectDetection.from_pretrained(...)``.
        size: Height and width that images are resized to; the default is 640x640 for RT-DETR, and for others their own
            resolution. The sides of YOLOS must be multiples of its patches.
        normalizes: Whether images are normalized by ImageNet's mean and standard deviation; the default is yes, but not
            for RT-DETR.
        min_score: Boxes with lower scores are left out.
        max_detections: How many boxes an image may have.
    """

    def __init__(
        self,
        net: Any,
        *,
        size: tuple[int, int] | None = None,
        normalizes: bool | None = None,
        min_score: float = 0.01,
        max_detections: int = 100,
    ) -> None:
        super().__init__(max_detections, num_classes=net.config.num_labels)
        kind = net.config.model_type
        is_rt = kind.startswith(("rt_detr", "d_fine"))
        self.net, self.size = net, (640, 640) if size is None and is_rt else size
        self.normalizes = not is_rt if normalizes is None else normalizes
        self.has_background = kind in ("detr", "table-transformer", "yolos")  # as the last class of a softmax
        self.min_score = min_score

    def _prepare(self, images: Tensor, scale: float = 1.0) -> Tensor:
        size = self.size if self.size is None or scale == 1 else _scale_size(self.size, scale)
        if size is not None and images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
        if self.normalizes:
            mean, std = (images.new_tensor(each).view(3, 1, 1) for each in (_IMAGENET_MEAN, _IMAGENET_STD))
            images = (images - mean) / std
        return images

    @override
    def predict(self, images: Tensor) -> list[Boxes]:
        return self._find(images, 1.0)

    @override
    def predict_scaled(self, images: Tensor, scale: float) -> list[Boxes]:
        return super().predict_scaled(images, scale) if self.size is None else self._find(images, scale)

    @torch.no_grad()
    def _find(self, images: Tensor, scale: float) -> list[Boxes]:
        out = self.net(pixel_values=self._prepare(images, scale))
        logits, places = at_least_float32(out.logits), at_least_float32(out.pred_boxes)
        height, width = images.shape[-2:]
        center, extent = places.split(2, -1)
        corners = torch.cat([center - extent / 2, center + extent / 2], -1)
        corners = corners.clamp(0, 1) * corners.new_tensor([width, height]).repeat(2)
        if self.has_background:  # one class for each query
            scores, classes = logits.softmax(-1)[..., :-1].max(-1)
            scores, order = scores.sort(dim=1, descending=True, stable=True)
            queries, classes = order, classes.gather(1, order)
        else:
            scores, order = logits.sigmoid().flatten(1).sort(dim=1, descending=True, stable=True)
            queries, classes = order // logits.shape[2], order % logits.shape[2]
        most = min(self.max_detections, logits.shape[1])
        (counts,) = read((scores > self.min_score).sum(1).clamp_max(most))
        return [
            Boxes(boxes=corners[row, queries[row, :count]], labels=classes[row, :count], scores=scores[row, :count])
            for row, count in enumerate(counts.tolist())
        ]

    @override
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        size = images.new_tensor(images.shape[-2:]).flip(0)
        labels = [
            {"class_labels": each["labels"].to(images.device), "boxes": _to_fractions(each["boxes"].to(images), size)}
            for each in targets
        ]
        loss: Tensor = self.net(pixel_values=self._prepare(images), labels=labels).loss
        return loss

    @override
    def features(self, images: Tensor) -> list[Tensor]:
        prepared = self._prepare(images)
        out = self.net(pixel_values=prepared)
        last = getattr(out, "encoder_last_hidden_state", None)
        if last is None:  # of a network without decoder, which has other tokens before and after those of the image
            others = self.net.config.num_detection_tokens
            last = out.last_hidden_state[:, 1:-others]
        return list(last) if isinstance(last, Sequence) else _restore_maps(last, prepared.shape[-2:])


def _scale_size(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """Return a size scaled to the nearest multiples of the stride that these networks have at the most."""
    height, width = (max(1, round(side * scale / 32)) * 32 for side in size)
    return height, width


def _restore_maps(tokens: Tensor, size: Sequence[int]) -> list[Tensor]:
    """Return the maps that tokens (N, n, C) of an image of a size were: of a stride, or from it on of each double."""
    for first in _STRIDES:
        shapes: list[tuple[int, int]] = []
        stride, missing = first, tokens.shape[1]
        while missing > 0 and stride <= max(size):
            shapes.append((-(-size[0] // stride), -(-size[1] // stride)))
            missing -= shapes[-1][0] * shapes[-1][1]
            stride *= 2
        if missing == 0:
            levels = tokens.transpose(1, 2).split([height * width for height, width in shapes], 2)
            return [level.unflatten(2, shape) for level, shape in zip(levels, shapes, strict=True)]
    raise InputError(f"the {tokens.shape[1]} tokens of the network are no maps of images of {size[0]}x{size[1]} pixels")


class TorchvisionDetector(Detector):
    """A Faster R-CNN, RetinaNet, FCOS, SSD or alike of torchvision, which resizes and normalizes images itself.

    Its losses need training mode, in which its BatchNorms would follow the batch: these stay in eval mode. Random
    proposals are drawn from a generator of their own, so that a step is the same each time.

    Args:
        net: The network, such as ``torchvision.models.detection.fasterrcnn_resnet50_fpn_v2(weights="DEFAULT")``.
        max_detections: How many boxes an image may have; the network has its own limit too.
    """

    def __init__(self, net: Any, *, max_detections: int = 100) -> None:
        head = getattr(getattr(net, "roi_heads", None), "box_predictor", None)
        head = getattr(head, "cls_score", None) or getattr(getattr(net, "head", None), "classification_head", None)
        names = ("out_features", "num_classes", "num_columns")  # of Faster R-CNN; of RetinaNet and FCOS; of SSD
        classes = next((getattr(head, name) for name in names if hasattr(head, name)), None)
        super().__init__(max_detections, num_classes=classes)
        self.net = net

    @override
    @torch.no_grad()
    def predict(self, images: Tensor) -> list[Boxes]:
        out = self.net(list(images))
        return [Boxes(boxes=each["boxes"], labels=each["labels"], scores=each["scores"]) for each in out]

    @override
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        kept = []
        for each in move_boxes(targets, torch.device("cpu")):
            is_box = ((each["boxes"][:, 2:] - each["boxes"][:, :2]) > 0).all(1)  # it raises for others
            kept.append(select_boxes(each, is_box) | {"boxes": each["boxes"][is_box].to(images.dtype)})
        kept = move_boxes(kept, images.device)
        modes = {module: module.training for module in self.net.modules()}
        try:
            for module in modes:
                if not isinstance(module, _BatchNorm | nn.Dropout):
                    module.training = True
            device = images.device
            others = {} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
            with torch.random.fork_rng(**{"devices": [], **others}):
                torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every device
                if others:
                    state = torch.Generator(device).manual_seed(0).get_state()
                    torch.get_device_module(device).set_rng_state(state, device)
                losses: dict[str, Tensor] = self.net(list(images), kept)
        finally:
            for module, mode in modes.items():
                module.training = mode
        return torch.stack([loss.sum() for loss in losses.values()]).sum()

    @override
    def features(self, images: Tensor) -> list[Tensor]:
        prepared, _ = self.net.transform(list(images), None)
        maps = self.net.backbone(prepared.tensors)
        return list(maps.values()) if isinstance(maps, dict) else [maps]


class UltralyticsDetector(Detector):
    """A YOLOv8, YOLO11 or alike of Ultralytics.

    A network from a file cannot learn as it is: its parameters require no gradients, and the weights of its loss are a
    dictionary, which the loss cannot read. It is copied, and both are changed in the copy.

    Args:
        net: The ``DetectionModel``, which ``YOLO("yolo11n.pt").model`` is before its first ``predict``: that fuses the
            BatchNorms into the convolutions.
        size: The longer side that images are scaled to; None to keep their resolution.
        min_score: Boxes with lower scores are left out.
        max_overlap: The largest intersection over union of two boxes of a class.
        max_detections: How many boxes an image may have.
    """

    STRIDE = 32

    def __init__(
        self,
        net: Any,
        *,
        size: int | None = 640,
        min_score: float = 0.01,
        max_overlap: float = 0.7,
        max_detections: int = 100,
    ) -> None:
        super().__init__(max_detections, num_classes=getattr(net, "nc", None) or net.model[-1].nc)
        if isinstance(net.args, Mapping) or not any(each.requires_grad for each in net.parameters()):
            net = _let_learn(net)
        self.net, self.size, self.min_score, self.max_overlap = net, size, min_score, max_overlap

    @override
    def predict(self, images: Tensor) -> list[Boxes]:
        return self._find(images, self.size)

    @override
    def predict_scaled(self, images: Tensor, scale: float) -> list[Boxes]:
        if self.size is None:
            return super().predict_scaled(images, scale)
        return self._find(images, max(1, round(self.size * scale)))

    @torch.no_grad()
    def _find(self, images: Tensor, size: int | None) -> list[Boxes]:
        canvas, fit = letterbox(images, size, self.STRIDE)
        out = self.net(canvas)
        table = out[0] if isinstance(out, tuple | list) else out  # (N, 4 + classes, boxes), center and extent in pixels
        center, extent, scores = at_least_float32(table).transpose(1, 2).split([2, 2, table.shape[1] - 4], -1)
        found = choose_boxes(
            torch.cat([center - extent / 2, center + extent / 2], -1),
            scores,
            min_score=self.min_score,
            max_overlap=self.max_overlap,
            max_boxes=self.max_detections,
        )
        return [each | {"boxes": fit.to_image(each["boxes"])} for each in found]

    @override
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        canvas, fit = letterbox(images, self.size, self.STRIDE)
        targets = move_boxes(targets, torch.device("cpu"))
        boxes = [fit.to_canvas(each["boxes"].to(canvas.dtype)) for each in targets]
        size = boxes[0].new_tensor(canvas.shape[-2:]).flip(0)
        is_box = [box_area(each) > 0 for each in boxes]
        numbers = [
            torch.full_like(each[mask][:, 0], number)
            for number, (each, mask) in enumerate(zip(boxes, is_box, strict=True))
        ]
        labels = [each["labels"][mask] for each, mask in zip(targets, is_box, strict=True)]
        batch = {
            "img": canvas,
            "batch_idx": torch.cat(numbers).to(canvas),
            "cls": torch.cat(labels).to(canvas).unsqueeze(1),
            "bboxes": torch.cat([_to_fractions(each[mask], size) for each, mask in zip(boxes, is_box, strict=True)]).to(
                canvas
            ),
        }
        total: Tensor = self.net.loss(batch)[0]
        return total.sum() / len(images)

    @override
    def features(self, images: Tensor) -> list[Tensor]:
        canvas, _ = letterbox(images, self.size, self.STRIDE)
        head = self.net.model[-1]
        found: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, inputs: found.extend(inputs[0]))
        try:
            self.net(canvas)
        finally:
            handle.remove()
        return found


def _let_learn(net: Any) -> Any:
    """Return a copy of a network of Ultralytics with gradients, and with settings that its loss can read."""
    with torch.inference_mode(False):  # or the copies would be inference tensors, which cannot be trained
        net = copy.deepcopy(net)
    if isinstance(net.args, Mapping):
        net.args = SimpleNamespace(**{**_ULTRALYTICS_GAINS, **net.args})
    if not any(each.requires_grad for each in net.parameters()):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and ".dfl." not in name)  # an integral, not learned
    return net
