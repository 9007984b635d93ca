"""The interface of a detector: three functions, behind which every library's networks look alike."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from ctta.core.validation import check_integer
from ctta.detection.boxes import Boxes, pack


class Detector(nn.Module, ABC):
    """A network that finds boxes, as the methods of :mod:`ctta.detection` see it.

    Images are RGB (N, 3, H, W) in [0, 1]. Whatever a network needs beyond that (another size, a border, normalization)
    happens within these functions, and boxes are in pixels of the given images.

    Args:
        max_detections: How many boxes an image may have; those with the highest scores count.
        num_classes: Number of labels, for methods that treat classes apart; None if it is not known.
    """

    def __init__(self, max_detections: int = 100, *, num_classes: int | None = None) -> None:
        super().__init__()
        self.max_detections = check_integer("max_detections", max_detections, 1)
        self.num_classes = num_classes

    @abstractmethod
    def predict(self, images: Tensor) -> list[Boxes]:
        """Find the boxes of each image.

        Give low scores too: a method, or a score such as mAP, chooses its own threshold.

        Args:
            images: (N, 3, H, W) in [0, 1].

        Returns:
            ``boxes``, ``scores`` and ``labels`` of each image, by descending score.
        """

    @abstractmethod
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        """Compute the loss with the given boxes as the truth.

        Args:
            images: (N, 3, H, W) in [0, 1].
            targets: ``boxes`` and ``labels`` of each image; both may be empty.

        Returns:
            The mean over images: a scalar with a graph.
        """

    @abstractmethod
    def features(self, images: Tensor) -> list[Tensor]:
        """Compute what the detection head reads.

        Args:
            images: (N, 3, H, W) in [0, 1].

        Returns:
            Maps (N, C, H, W), from fine to coarse, with a graph.
        """

    def predict_scaled(self, images: Tensor, scale: float) -> list[Boxes]:
        """Find the boxes of each image when the network sees it smaller or larger than in :meth:`predict`.

        A detector that resizes images itself overrides this; others see resized images.

        Args:
            images: (N, 3, H, W) in [0, 1].
            scale: The size relative to that in :meth:`predict`.

        Returns:
            As :meth:`predict`, in pixels of the given images.
        """
        height, width = images.shape[-2:]
        size = [max(1, round(side * scale)) for side in (height, width)]
        scaled = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=scale < 1)
        factors = [width / scaled.shape[-1], height / scaled.shape[-2]] * 2
        return [each | {"boxes": each["boxes"] * each["boxes"].new_tensor(factors)} for each in self.predict(scaled)]

    def find_adaptor_sites(self) -> list[tuple[str, str]]:
        """Return where WHW adds adaptors: names of convolutions, and of the norm layers whose outputs they add to.

        These are the pointwise convolutions that follow a wider one, such as the last of a ResNet's bottleneck.
        """
        layers = [(name, each) for name, each in self.named_modules() if isinstance(each, nn.Conv2d | _NormBase)]
        sites, width = [], 1
        for (name, layer), (next_name, following) in pairwise(layers):
            if isinstance(layer, nn.Conv2d):
                if width > 1 and layer.kernel_size == (1, 1) and isinstance(following, _NormBase):
                    sites.append((name, next_name))
                width = layer.kernel_size[0]
        return sites

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the boxes as one tensor, see :func:`ctta.detection.pack`."""
        return pack(self.predict(images), self.max_detections)


class GivenDetector(Detector):
    """A network that has the three functions itself, without being a :class:`Detector`.

    Args:
        net: A module with ``predict``, ``loss`` and ``features``.
        max_detections: How many boxes an image may have.
    """

    def __init__(self, net: Any, max_detections: int = 100) -> None:
        super().__init__(max_detections, num_classes=getattr(net, "num_classes", None))
        self.net = net

    @override
    def predict(self, images: Tensor) -> list[Boxes]:
        found: list[Boxes] = self.net.predict(images)
        return found

    @override
    def loss(self, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
        loss: Tensor = self.net.loss(images, targets)
        return loss

    @override
    def features(self, images: Tensor) -> list[Tensor]:
        maps: list[Tensor] = self.net.features(images)
        return maps
