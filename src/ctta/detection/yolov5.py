"""The YOLOv5 network, its loss, and a reader of its released weights that executes none of what they contain."""

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.parallel import read
from ctta.core.validation import check_integer, check_positive
from ctta.detection.boxes import Boxes, choose_boxes, letterbox
from ctta.detection.detector import Detector
from ctta.errors import CheckpointError, InputError
from ctta.functional import at_least_float32

#: Width and height of the anchors of the released networks, in pixels, for strides 8, 16 and 32.
ANCHORS = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
STRIDES = (8, 16, 32)
#: A box matches an anchor if neither side is this many times as long.
MAX_RATIO = 4.0
#: The weight of each level in the loss of objectness.
LEVEL_WEIGHTS = (4.0, 1.0, 0.4)


class ConvNormAct(nn.Module):
    """A convolution without bias, BatchNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int | None = None) -> None:
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        x = self.act(self.bn(self.conv(x)))
        return x


class Residual(nn.Module):
    """Two convolutions, and their input added if ``adds``."""

    def __init__(self, channels: int, adds: bool) -> None:
        super().__init__()
        self.cv1, self.cv2, self.adds = ConvNormAct(channels, channels), ConvNormAct(channels, channels, 3), adds

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.adds else y


class CrossStage(nn.Module):
    """Residual blocks on half of the channels, joined with the other half (C3)."""

    def __init__(self, inputs: int, outputs: int, num_blocks: int, adds: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.cv1, self.cv2 = ConvNormAct(inputs, half), ConvNormAct(inputs, half)
        self.cv3 = ConvNormAct(2 * half, outputs)
        self.m = nn.Sequential(*(Residual(half, adds) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        y: Tensor = self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))
        return y


class SpatialPyramid(nn.Module):
    """Three max-pools in series, joined with their input (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = ConvNormAct(channels, channels // 2), ConvNormAct(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        pooled = [self.cv1(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, stride=1, padding=2))
        y: Tensor = self.cv2(torch.cat(pooled, 1))
        return y


class DetectionHead(nn.Module):
    """One linear layer for each level: boxes, objectness and class logits of three anchors at every cell."""

    anchors: Tensor

    def __init__(self, num_classes: int, anchors: Sequence[Sequence[Sequence[float]]], channels: Sequence[int]) -> None:
        super().__init__()
        self.num_outputs = num_classes + 5
        sizes = torch.tensor(anchors, dtype=torch.float32)
        self.register_buffer("anchors", sizes / torch.tensor(STRIDES, dtype=torch.float32).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(each, sizes.shape[1] * self.num_outputs, 1) for each in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return a map (N, anchors, H, W, 5 + classes) for each level."""
        found = [layer(x) for layer, x in zip(self.m, maps, strict=True)]
        return [each.unflatten(1, (-1, self.num_outputs)).permute(0, 1, 3, 4, 2) for each in found]


class YOLOv5(nn.Module):
    """YOLOv5 in the graph of its version 6, with random weights; the names of its layers are those of released files.

    Args:
        num_classes: Number of classes.
        width: Channels relative to the largest network; 0.5 for YOLOv5s.
        depth: Number of blocks relative to it; 1/3 for YOLOv5s.
        anchors: Width and height of three anchors for each of the strides 8, 16 and 32, in pixels.
        gains: The weights of box, objectness and class in the loss, as the network was trained with. The default is
            for images of 640 pixels and the 80 classes of COCO.

    >>> net = YOLOv5(num_classes=3, width=0.125)
    >>> [tuple(each.shape) for each in net(torch.rand(1, 3, 64, 96))]
    [(1, 3, 8, 12, 8), (1, 3, 4, 6, 8), (1, 3, 2, 3, 8)]
    """

    #: Where the maps come from that the head reads.
    LEVELS = (17, 20, 23)

    def __init__(
        self,
        num_classes: int = 80,
        *,
        width: float = 0.5,
        depth: float = 1 / 3,
        anchors: Sequence[Sequence[Sequence[float]]] = ANCHORS,
        gains: tuple[float, float, float] = (0.05, 1.0, 0.5),
    ) -> None:
        super().__init__()
        check_integer("num_classes", num_classes, 1)
        check_positive("width", width)
        check_positive("depth", depth)
        self.num_classes, self.gains = num_classes, gains
        a, b, c, d, e = (8 * max(1, -int(-channels * width // 8)) for channels in (64, 128, 256, 512, 1024))
        one, two, three = (max(1, round(count * depth)) for count in (3, 6, 9))
        up, join = nn.Upsample(scale_factor=2, mode="nearest"), nn.Identity()
        self.model = nn.ModuleList(
            [
                ConvNormAct(3, a, 6, 2, 2),
                ConvNormAct(a, b, 3, 2),
                CrossStage(b, b, one),
                ConvNormAct(b, c, 3, 2),
                CrossStage(c, c, two),
                ConvNormAct(c, d, 3, 2),
                CrossStage(d, d, three),
                ConvNormAct(d, e, 3, 2),
                CrossStage(e, e, one),
                SpatialPyramid(e),
                ConvNormAct(e, d),
                up,
                join,
                CrossStage(2 * d, d, one, adds=False),
                ConvNormAct(d, c),
                up,
                join,
                CrossStage(2 * c, c, one, adds=False),
                ConvNormAct(c, c, 3, 2),
                join,
                CrossStage(2 * c, d, one, adds=False),
                ConvNormAct(d, d, 3, 2),
                join,
                CrossStage(2 * d, e, one, adds=False),
                DetectionHead(num_classes, anchors, (c, d, e)),
            ]
        )

    def features(self, x: Tensor) -> list[Tensor]:
        """Compute what the head reads.

        Args:
            x: Images (N, 3, H, W) in [0, 1], whose sides are multiples of 32.

        Returns:
            Maps of strides 8, 16 and 32.
        """
        if x.ndim != 4 or x.shape[2] % STRIDES[-1] or x.shape[3] % STRIDES[-1]:
            raise InputError(f"expected images (N, 3, H, W) with sides that are multiples of 32, got {tuple(x.shape)}")
        joined = {12: 6, 16: 4, 19: 14, 22: 10}  # which earlier output each of these is joined with
        outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(self.model[:-1]):
            x = torch.cat([x, outputs[joined[number]]], 1) if number in joined else layer(x)
            outputs[number] = x
        return [outputs[number] for number in self.LEVELS]

    @override
    def forward(self, x: Tensor) -> list[Tensor]:
        """Return raw maps (N, 3, H/s, W/s, 5 + classes) for the strides s."""
        found: list[Tensor] = self.head(self.features(x))
        return found

    @property
    def head(self) -> DetectionHead:
        """The last layer."""
        head = self.model[-1]
        assert isinstance(head, DetectionHead), "built above"
        return head

    @property
    def anchors(self) -> Tensor:
        """Width and height of the anchors in cells of their level (levels, 3, 2)."""
        return self.head.anchors

    def initialize_head_(self, num_objects: float = 8.0, image_side: float = 640.0) -> None:
        """Let the head start from the frequency of objects, for training from random weights.

        Args:
            num_objects: How many objects an image has.
            image_side: The side of a square image of the same number of pixels.
        """
        for layer, stride in zip(self.head.m, STRIDES, strict=True):
            assert isinstance(layer, nn.Conv2d) and layer.bias is not None, "built above"
            bias = layer.bias.detach().view(-1, self.num_classes + 5)
            bias[:, 4] += torch.tensor(num_objects / (image_side / stride) ** 2).log()
            bias[:, 5:] += torch.tensor(0.6 / (self.num_classes - 0.99999)).log()


def decode(raw: Sequence[Tensor], anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Return what raw maps say.

    Args:
        raw: Maps (N, anchors, H, W, 5 + classes) of the network.
        anchors: Width and height of the anchors in cells (levels, anchors, 2).

    Returns:
        Boxes (N, M, 4) in pixels of the network's input, and their scores for each class (N, M, classes): objectness
        times probability.
    """
    boxes, scores = [], []
    for level, sizes, stride in zip(raw, anchors, STRIDES, strict=True):
        values = at_least_float32(level).sigmoid()  # 16 bits are too few for pixels
        rows, columns = (torch.arange(count, device=level.device) for count in level.shape[2:4])
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        center = (2 * values[..., :2] - 0.5 + grid) * stride
        half = (2 * values[..., 2:4]).square() * sizes[:, None, None] * (stride / 2)
        boxes.append(torch.cat([center - half, center + half], -1).flatten(1, 3))
        scores.append((values[..., 4:5] * values[..., 5:]).flatten(1, 3))
    return torch.cat(boxes, 1), torch.cat(scores, 1)


def complete_iou(boxes: Tensor, others: Tensor, eps: float = 1e-7) -> Tensor:
    """Return the complete intersection over union of pairs of boxes given as center, width and height (n, 4)."""
    (x, y, w, h), (u, v, s, t) = boxes.unbind(-1), others.unbind(-1)
    left, right = torch.maximum(x - w / 2, u - s / 2), torch.minimum(x + w / 2, u + s / 2)
    top, bottom = torch.maximum(y - h / 2, v - t / 2), torch.minimum(y + h / 2, v + t / 2)
    inner = (right - left).clamp_min(0) * (bottom - top).clamp_min(0)
    iou = inner / (w * h + s * t - inner + eps)
    hull_width = torch.maximum(x + w / 2, u + s / 2) - torch.minimum(x - w / 2, u - s / 2)
    hull_height = torch.maximum(y + h / 2, v + t / 2) - torch.minimum(y - h / 2, v - t / 2)
    diagonal = hull_width.square() + hull_height.square() + eps
    distance = ((x - u).square() + (y - v).square()) / diagonal
    shape = 4 / torch.pi**2 * (torch.atan(s / (t + eps)) - torch.atan(w / (h + eps))).square()
    weight = (shape / (1 - iou + shape + eps)).detach()
    return iou - distance - weight * shape


def match_anchors(targets: Tensor, anchors: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """Return which cells and anchors of a level should find which objects.

    An object belongs to the anchors of similar shape, in the cell of its center and in the two nearest neighbors.

    Args:
        targets: Image, class, center x, center y, width and height (n, 6), the last four as fractions of the image.
        anchors: Width and height of the anchors in cells (anchors, 2).
        height: Rows of the level.
        width: Columns of the level.

    Returns:
        Image, anchor, row, column and class (m each), the box (m, 4) in cells relative to the cell's corner, and the
        anchor's size (m, 2).
    """
    scale = targets.new_tensor([width, height, width, height])
    boxes = targets[:, 2:] * scale
    ratio = boxes[None, :, 2:] / anchors[:, None]
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < MAX_RATIO
    anchor, index = fits.nonzero(as_tuple=True)
    center, limits = boxes[index, :2], targets.new_tensor([width, height])
    low = (center % 1 < 0.5) & (center > 1)
    high = ((limits - center) % 1 < 0.5) & (limits - center > 1)
    is_used = torch.stack([torch.ones_like(low[:, 0]), low[:, 0], low[:, 1], high[:, 0], high[:, 1]])
    shifts = targets.new_tensor([[0, 0], [0.5, 0], [0, 0.5], [-0.5, 0], [0, -0.5]])
    shift, entry = is_used.nonzero(as_tuple=True)
    anchor, index = anchor[entry], index[entry]
    center = boxes[index, :2]
    cell = (center - shifts[shift]).long()
    column, row = cell[:, 0].clamp(0, width - 1), cell[:, 1].clamp(0, height - 1)
    box = torch.cat([center - torch.stack([column, row], 1), boxes[index, 2:]], 1)
    image, label = targets[index, :2].long().T
    return image, anchor, row, column, label, box, anchors[anchor]


def yolov5_loss(raw: Sequence[Tensor], targets: Tensor, anchors: Tensor, gains: tuple[float, float, float]) -> Tensor:
    """Return the loss that YOLOv5 is trained with, per image.

    Where two objects claim an anchor of a cell, its objectness is the larger overlap, so that the result does not
    depend on their order.

    Args:
        raw: Maps of the network.
        targets: As for :func:`match_anchors`; those without extent are left out.
        anchors: Width and height of the anchors in cells (levels, anchors, 2).
        gains: The weights of box, objectness and class.

    Returns:
        The loss; upstream multiplies it with the number of images.
    """
    of_boxes, of_objects, of_classes = (at_least_float32(raw[0]).new_zeros(()) for _ in range(3))
    targets, anchors = read(targets, anchors)  # how many cells an object belongs to is decided on the host
    targets = targets[(targets[:, 4:] > 0).all(1)]
    for values, sizes, weight in zip(raw, anchors, LEVEL_WEIGHTS, strict=True):
        level = at_least_float32(values)
        objectness = level.new_zeros(level.shape[:-1])  # contiguous, whatever the map is
        *at, label, box, size = match_anchors(targets, sizes, *level.shape[2:4])
        if len(label):
            steps = zip(at, objectness.stride(), strict=True)
            flat = torch.stack([place * step for place, step in steps]).sum(0)
            whole = torch.stack([*at, label, flat]).to(level.device, non_blocking=True)
            image, anchor, row, column, label, flat = whole
            box, size = torch.cat([box, size], 1).to(level.device, non_blocking=True).split([4, 2], 1)
            found = level[image, anchor, row, column]
            center = 2 * found[:, :2].sigmoid() - 0.5
            extent = (2 * found[:, 2:4].sigmoid()).square() * size
            overlap = complete_iou(torch.cat([center, extent], 1), box)
            of_boxes = of_boxes + (1 - overlap).mean()
            claimed = overlap.detach().clamp_min(0).to(objectness.dtype)
            objectness.view(-1).scatter_reduce_(0, flat, claimed, "amax")
            if level.shape[-1] > 6:
                # F.one_hot reads the labels of some devices.
                classes = (label[:, None] == torch.arange(level.shape[-1] - 5, device=label.device)).to(found.dtype)
                of_classes = of_classes + F.binary_cross_entropy_with_logits(found[:, 5:], classes)
        of_objects = of_objects + weight * F.binary_cross_entropy_with_logits(level[..., 4], objectness)
    return gains[0] * of_boxes + gains[1] * of_objects + gains[2] * of_classes


class YOLOv5Detector(Detector):
    """A YOLOv5 network behind the interface of a detector.

    Args:
        net: The network.
        size: The longer side that images are scaled to; None to keep their resolution.
        min_score: Boxes with lower scores are left out.
        max_overlap: The largest intersection over union of two boxes of a class.
        max_detections: How many boxes an image may have.

    >>> detector = YOLOv5Detector(YOLOv5(num_classes=3, width=0.125))
    >>> sorted(detector.predict(torch.rand(2, 3, 60, 90))[0])
    ['boxes', 'labels', 'scores']
    """

    def __init__(
        self,
        net: YOLOv5,
        *,
        size: int | None = None,
        min_score: float = 0.01,
        max_overlap: float = 0.6,
        max_detections: int = 100,
    ) -> None:
        super().__init__(max_detections, num_classes=net.num_classes)
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
        canvas, fit = letterbox(images, size, STRIDES[-1])
        found = choose_boxes(
            *decode(self.net(canvas), self.net.anchors),
            min_score=self.min_score,
            max_overlap=self.max_overlap,
            max_boxes=self.max_detections,
        )
        return [each | {"boxes": fit.to_image(each["boxes"])} for each in found]

    @override
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        canvas, fit = letterbox(images, self.size, STRIDES[-1])
        rows = []
        for number, each in enumerate(targets):
            corners = fit.to_canvas(each["boxes"].to(canvas))
            low, high = corners[:, :2], corners[:, 2:]
            fractions = torch.cat([(low + high) / 2, high - low], 1) / canvas.new_tensor(canvas.shape[-2:]).flip(
                0
            ).repeat(2)
            names = torch.stack([torch.full_like(each["labels"], number), each["labels"]], 1)
            rows.append(torch.cat([names.to(fractions), fractions], 1))
        return yolov5_loss(self.net(canvas), torch.cat(rows), self.net.anchors, self.net.gains)

    @override
    def features(self, images: Tensor) -> list[Tensor]:
        return self.net.features(letterbox(images, self.size, STRIDES[-1])[0])

    @override
    def find_adaptor_sites(self) -> list[tuple[str, str]]:
        blocks = [name for name, module in self.named_modules() if isinstance(module, CrossStage)]
        return [(f"{name}.cv3.conv", f"{name}.cv3.bn") for name in blocks]


# ---- released weights ----


class _Inert:
    """What stands for every object of a pickle that is not a tensor or a plain value: it keeps its state, as data."""

    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


class _Function:
    """A function that a file may call, but not change, which pickle allows for functions themselves."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the file sets the state of a function")


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that builds tensors and plain values, and imports nothing else."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): tuple,
        ("torch._utils", "_rebuild_tensor_v2"): _Function(torch._utils._rebuild_tensor_v2),
        ("torch._utils", "_rebuild_parameter"): _Function(lambda data, requires_grad, hooks: data),
    }

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return self._ALLOWED.get((module_name, global_name), _Inert)


def _refuse_legacy(*args: Any, **kwargs: Any) -> Any:
    raise pickle.UnpicklingError("the format of torch before 1.6")


def read_released_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights in a released YOLOv5 checkpoint, without importing or executing what it names.

    Such a file is the pickle of a whole network, of classes that are not installed. Here every class and function in it
    is replaced by an inert placeholder; only tensors are rebuilt.

    Args:
        path: The file, such as ``yolov5s.pt``.

    Returns:
        The tensors by the names of :class:`YOLOv5`, as float32; integer counters are left out.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is damaged, or is not such a checkpoint.
    """
    return _collect_weights(_read_network(Path(path).expanduser()))


def _read_network(path: Path) -> _Inert:
    if not path.is_file():
        raise FileNotFoundError(f"weights file not found: {path}")
    reader = SimpleNamespace(__name__="pickle", Unpickler=_InertUnpickler, load=_refuse_legacy)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("constants.pkl") for name in archive.namelist()):
                raise CheckpointError(f"{path} is a TorchScript archive; expected a checkpoint such as yolov5s.pt")
        content = torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes lead to any of them
        raise CheckpointError(f"{path} is damaged, or not a checkpoint of YOLOv5: {error}") from error
    found = content if isinstance(content, dict) else {}
    network = found.get("ema") or found.get("model")
    if not isinstance(network, _Inert):
        raise CheckpointError(f"{path} holds no network under 'model': expected a checkpoint such as yolov5s.pt")
    return network


def _collect_weights(network: _Inert) -> dict[str, Tensor]:
    return {
        name: value.float()
        for name, value in _iter_tensors(network, "")
        if value.is_floating_point() and not name.endswith("anchor_grid")
    }


def _iter_tensors(module: _Inert, prefix: str) -> Iterator[tuple[str, Tensor]]:
    state = module.state if isinstance(module.state, dict) else {}
    for table in ("_parameters", "_buffers"):
        tensors = state.get(table)
        for name, value in tensors.items() if isinstance(tensors, dict) else ():
            if isinstance(value, Tensor):
                yield f"{prefix}{name}", value
    children = state.get("_modules")
    for name, child in children.items() if isinstance(children, dict) else ():
        if isinstance(child, _Inert):
            yield from _iter_tensors(child, f"{prefix}{name}.")


def load_yolov5(path: str | os.PathLike[str], **settings: Any) -> YOLOv5Detector:
    """Return a detector with the weights of a released checkpoint, whose size and classes are read from its tensors.

    The weights of its loss are those that it was trained with, if the checkpoint says so.

    Args:
        path: The file, such as ``yolov5s.pt``; see :func:`read_released_weights`.
        **settings: Arguments of :class:`YOLOv5Detector`; by default images are scaled to 640 pixels.

    Returns:
        The detector, in eval mode.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is damaged, or is not a checkpoint of this network.
    """
    from ctta.models.weights import copy_weights_

    path = Path(path).expanduser()
    network = _read_network(path)
    weights = _collect_weights(network)
    try:
        first, head = weights["model.0.conv.weight"], weights["model.24.m.0.weight"]
        depth = len({name.split(".")[3] for name in weights if name.startswith("model.6.m.")}) / 9
        anchors = weights["model.24.anchors"] * torch.tensor(STRIDES).view(-1, 1, 1)
    except (KeyError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold a YOLOv5 network of version 6 for detection") from error
    net = YOLOv5(len(head) // 3 - 5, width=len(first) / 64, depth=depth, anchors=anchors.tolist())
    net.gains = _read_gains(network) or net.gains
    copy_weights_(net, weights, origin=path)
    return YOLOv5Detector(net, **{"size": 640, **settings}).eval()


def _read_gains(network: _Inert) -> tuple[float, float, float] | None:
    """Return the weights of box, objectness and class in the loss that a network was trained with, if it says so."""
    hyp, names = network.state.get("hyp") if isinstance(network.state, dict) else None, ("box", "obj", "cls")
    if not isinstance(hyp, dict) or not all(isinstance(hyp.get(name), int | float) for name in names):
        return None
    return hyp["box"], hyp["obj"], hyp["cls"]
