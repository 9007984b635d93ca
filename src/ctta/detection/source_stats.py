"""What ActMAD and WHW need to know of source images: activations and features of a detector."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.core.parallel import change_call, current_call
from ctta.detection.boxes import Boxes, move_boxes, select_boxes, unpack
from ctta.detection.detector import Detector
from ctta.detection.libraries import as_detector
from ctta.errors import InputError
from ctta.functional import at_least_float32
from ctta.nn import find_norm_layers
from ctta.nn.norm import NetworkHook
from ctta.nn.surgery import copy_for_adaptation, fingerprint, iter_inputs
from ctta.source_stats import SourceStats

#: How sure a detector must be of a box for its features to count (WHW).
MIN_OBJECT_SCORE = 0.5
#: The first images, whose mean is compared with that of all (WHW).
NUM_FIRST_IMAGES = 20
#: Points along each side of a box at which a map is read.
_POINTS = 3


@dataclass(frozen=True)
class RecordOutput(NetworkHook):
    """A forward hook that leaves the output of a layer with the call in progress, if that asks for it."""

    name: str

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record the output by the name of the layer."""
        if isinstance(found := current_call().batch_facts, dict):
            found[self.name] = output


def record_layers_(net: nn.Module) -> list[str]:
    """Let the norm layers of a network record their outputs.

    Args:
        net: The network.

    Returns:
        Their names.
    """
    norms = find_norm_layers(net)
    names = [name for name, _ in net.named_modules() if name in norms]
    for name in names:
        net.get_submodule(name).register_forward_hook(RecordOutput(name))
    return names


@contextmanager
def recorded_outputs() -> Iterator[dict[str, Tensor]]:
    """Yield what the layers of :func:`record_layers_` return within the context, by name."""
    found: dict[str, Tensor] = {}
    with change_call(batch_facts=found):
        yield found


def pool_objects(maps: Sequence[Tensor], found: Sequence[Boxes], size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the features of the boxes that a detector is sure of: means of the finest map within each box.

    Args:
        maps: Of :meth:`Detector.features`.
        found: The boxes of each image.
        size: Height and width of the images.

    Returns:
        Features (n, C), and the classes (n), which are on the host.
    """
    finest = at_least_float32(maps[0])
    steps = (torch.arange(_POINTS).to(finest) + 0.5) / _POINTS
    on_host = move_boxes(found, torch.device("cpu"))
    sure = [select_boxes(each, each["scores"] >= MIN_OBJECT_SCORE) for each in on_host]
    features, labels = [finest.new_zeros(0, finest.shape[1])], torch.cat([each["labels"] for each in sure])
    for map_of_image, each in zip(finest, move_boxes(sure, finest.device), strict=True):
        boxes = each["boxes"].to(map_of_image)
        if not len(boxes):
            continue
        x = boxes[:, 0:1] + (boxes[:, 2:3] - boxes[:, 0:1]) * steps
        y = boxes[:, 1:2] + (boxes[:, 3:4] - boxes[:, 1:2]) * steps
        at = torch.stack(
            [x[:, None].expand(-1, _POINTS, -1) / size[1], y[:, :, None].expand(-1, -1, _POINTS) / size[0]], -1
        )
        values = F.grid_sample(
            map_of_image[None], 2 * at.flatten(0, 1)[None] - 1, align_corners=False, padding_mode="border"
        )
        features.append(values[0].unflatten(1, (len(boxes), _POINTS)).mean((2, 3)).T)
    return torch.cat(features), labels


class _Gaussian:
    """Mean and covariance of vectors, batch by batch, in float64."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []

    def add(self, vectors: Tensor) -> None:
        self.vectors.append(vectors.detach().cpu().double())

    @property
    def all(self) -> Tensor:
        return torch.cat(self.vectors)

    def moments(self) -> tuple[Tensor, Tensor]:
        vectors = self.all
        mean = vectors.mean(0)
        return mean, (vectors - mean).T @ (vectors - mean) / max(1, len(vectors) - 1)


def regularize(covariance: Tensor) -> Tensor:
    """Return a covariance with a thirtieth of its largest entry added to the diagonal (WHW)."""
    scale = (covariance.max() / 30).clamp_min(torch.finfo(covariance.dtype).eps)  # of equal vectors too
    return covariance + scale * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


@torch.inference_mode(False)
@torch.no_grad()
def detection_stats(detector: nn.Module, batches: Iterable[Any]) -> SourceStats:
    """Compute what the methods for detectors need of source images, without labels.

    ==============  ================================================================================================
    ``location``    per norm layer: mean and variance over the images of a batch at every place of every channel,
                    averaged over batches (ActMAD); for batches of at least two images of one size
    ``channel``     the same over images and places
    ``level``       per map of :meth:`Detector.features`: mean and covariance of its spatial means, and how far the
                    mean of the first 20 images is from that of all (WHW)
    ``object``      per class: mean and covariance of the features of boxes with scores of at least 0.5 (WHW)
    ==============  ================================================================================================

    Args:
        detector: The detector, or a network that :func:`ctta.detection.as_detector` knows.
        batches: Images (N, 3, H, W) in [0, 1], or tuples that start with them, as they come in the stream: of its size,
            and as many in a batch.

    Returns:
        The statistics, for ``source_stats=`` of the methods; ``save`` writes them to a file.

    Raises:
        InputError: There are fewer than two images, or they differ in size.
    """
    given = as_detector(detector)
    net = copy_for_adaptation(given, batch_stats=0.0, output=None)
    assert isinstance(net, Detector), "copies keep their class"
    record_layers_(net)
    totals: dict[str, tuple[Tensor, int]] = {}
    levels: dict[int, _Gaussian] = {}
    objects: dict[int, _Gaussian] = {}
    num_images, shapes = 0, set()
    for x in iter_inputs(batches, net):
        with recorded_outputs() as outputs:
            maps = net.features(x)
        for name, output in outputs.items():
            for kind, per_layer in measure_layer(output).items():
                key = f"{kind}/{name}"
                total, count = totals.get(key, (torch.zeros_like(per_layer), 0))
                totals[key] = total + per_layer, count + 1
        for number, each in enumerate(maps):
            levels.setdefault(number, _Gaussian()).add(each.mean((2, 3)))
        features, labels = pool_objects(maps, unpack(net(x)), x.shape[2:])
        for label in labels.unique().tolist():
            objects.setdefault(label, _Gaussian()).add(features[labels == label])
        num_images += len(x)
        shapes.add(tuple(x.shape[1:]))
        if len(shapes) > 1:
            raise InputError(f"the images of all batches must have one size, got {sorted(shapes)}: resize or crop them")
    if num_images < 2:
        raise InputError(f"statistics need two source images or more, got {num_images}: give some hundred")
    dtype = next(iter(given.parameters())).dtype
    tensors: dict[str, Tensor] = {key: total / count for key, (total, count) in totals.items()}
    for number, gaussian in levels.items():
        mean, covariance = gaussian.moments()
        first = gaussian.all[:NUM_FIRST_IMAGES].mean(0) - mean
        tensors[f"level.mean/{number}"], tensors[f"level.covariance/{number}"] = mean, covariance
        tensors[f"level.divergence/{number}"] = 0.5 * first @ torch.linalg.solve(regularize(covariance), first)
    for label, gaussian in sorted(objects.items()):
        if len(gaussian.all) > 1:
            mean, covariance = gaussian.moments()
            tensors[f"object.mean/{label}"], tensors[f"object.covariance/{label}"] = mean, covariance
    return SourceStats(
        {name: value.to(dtype) for name, value in tensors.items()},
        fingerprint=fingerprint(given),
        num_images=num_images,
        is_labeled=False,
    )


def measure_layer(output: Tensor) -> Mapping[str, Tensor]:
    """Return means and unbiased variances of a layer's output (N, C, ...), at every place and of every channel."""
    output, places = at_least_float32(output), [0, *range(2, output.ndim)]
    is_single = output.numel() == output.shape[1]  # of which there is no variance
    found = {"channel.mean": output.mean(places), "channel.variance": output.var(places, correction=1 - is_single)}
    if len(output) > 1:
        found |= {"location.mean": output.mean(0), "location.variance": output.var(0)}
    return found
