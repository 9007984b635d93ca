"""What the methods for detectors share, and their names."""

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.detection.boxes import Boxes, unpack
from ctta.detection.detector import Detector
from ctta.detection.libraries import as_detector
from ctta.errors import ConfigError, InputError
from ctta.source_stats import SourceStats

#: Number of cells along each side of an image that a guard compares.
GUARD_CELLS = 24
#: The smallest probability of a class in a cell.
MIN_CELL_PROBABILITY = 1e-3


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


class DetectionModel(AdaptiveModel):
    """A method for detectors: an :class:`~ctta.AdaptiveModel` that answers boxes.

    Within a step the boxes of a batch are one tensor, see :func:`ctta.detection.pack`, so that saving, resetting,
    forking, policies and random draws are those of every method.
    """

    answers_logits = False
    supports_data_parallel = False  # how many boxes there are differs between ranks
    #: Whether the method changes nothing but the statistics of BatchNorms.
    needs_batch_norm: ClassVar[bool] = False
    source: Detector

    @override
    def forward(self, x: Tensor) -> list[Boxes]:  # type: ignore[override]
        """Return ``adapt(x)``, or ``predict(x)`` while frozen."""
        return self.predict(x) if self.frozen else self.adapt(x)

    @override
    def adapt(self, x: Tensor) -> list[Boxes]:  # type: ignore[override]
        """Find the boxes of a batch and learn from it.

        Args:
            x: Images (N, 3, H, W) in [0, 1].

        Returns:
            ``boxes``, ``scores`` and ``labels`` of each image, by descending score.

        Raises:
            InputError: The batch cannot be processed; nothing has changed.
        """
        return unpack(super().adapt(x))

    @override
    def predict(self, x: Tensor) -> list[Boxes]:  # type: ignore[override]
        """Return what ``adapt(x)`` would return, without changing anything.

        Args:
            x: Images (N, 3, H, W) in [0, 1].

        Returns:
            The boxes of each image.
        """
        return unpack(super().predict(x))

    @override
    def predict_once(self, x: Tensor) -> list[Boxes]:  # type: ignore[override]
        """Return the boxes of one pass of the adapted network, without changing anything.

        Args:
            x: Images (N, 3, H, W) in [0, 1].

        Returns:
            The boxes of each image.
        """
        return unpack(super().predict_once(x))

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        if x.ndim != 4 or (len(x) and x.shape[1] != 3):
            raise InputError(f"expected RGB images (N, 3, height, width) in [0, 1], got shape {tuple(x.shape)}")

    @override
    def compile(self, **options: Any) -> Any:
        """Raise a ConfigError: how many boxes there are depends on the image."""
        raise ConfigError("a detector is not compiled: how many boxes it compares depends on the image")

    @override
    def judged_logits(self, answer: Tensor, x: Tensor) -> Tensor:
        """Return which class covers each cell of a grid over the image, and how surely; the first class is nothing.

        Args:
            answer: The boxes as one tensor.
            x: The images.

        Returns:
            Logits (N, 1 + classes, cells, cells).
        """
        cells = (torch.arange(GUARD_CELLS).to(answer) + 0.5) / GUARD_CELLS
        left, top, right, bottom, score, label = answer.unbind(-1)
        columns, rows = cells * x.shape[3], cells * x.shape[2]
        across = (left[..., None] <= columns) & (columns < right[..., None])
        down = (top[..., None] <= rows) & (rows < bottom[..., None])
        covered = down[..., None] & across[..., None, :]  # (N, boxes, cells, cells)
        num_classes = self.source.num_classes or 1
        surest = [
            (covered * (score * (label % num_classes == number) * (label >= 0))[..., None, None]).amax(1)
            for number in range(num_classes)
        ]
        found = torch.stack(surest, 1).clamp(0, 1 - MIN_CELL_PROBABILITY)
        nothing = 1 - found.amax(1, keepdim=True)
        probabilities = torch.cat([nothing, found], 1).clamp_min(MIN_CELL_PROBABILITY)
        return (probabilities / probabilities.sum(1, keepdim=True)).log()

    def _take_source(self, net: nn.Module) -> tuple[nn.Module, set[str]]:
        detector = as_detector(net)
        if self.needs_batch_norm and not any(_has_statistics(module) for module in detector.modules()):
            warnings.warn(
                f"{type(self).__name__} predicts as the source, because {type(net).__name__} has no BatchNorm with "
                "running statistics: choose 'cotta' or 'actmad'. (YOLO.predict of Ultralytics fuses them away: load "
                "the network again, and adapt it before)",
                stacklevel=2,
            )
        return super()._take_source(detector)

    def copy_of_detector(self) -> Detector:
        """Return :meth:`copy_of_source` as what it is."""
        copied = self.copy_of_source()
        assert isinstance(copied, Detector), "copies keep their class"
        return copied

    @override
    def count_classes(self, num_classes: int | None = None) -> int:
        """Return the number of classes of the detector.

        Args:
            num_classes: The hyperparameter ``num_classes``: None to ask the detector.

        Raises:
            ConfigError: It does not say.
        """
        found = self.source.num_classes if num_classes is None else num_classes
        if found is None:
            raise ConfigError(f"{type(self).__name__} needs the number of classes: give num_classes=...")
        return super().count_classes(max(2, found))

    @override
    def use_source_stats(self, stats: SourceStats | None, *names: str) -> SourceStats:
        if stats is None:
            raise ConfigError(
                f"{type(self).__name__} needs statistics of source images: give "
                "source_stats=ctta.detection.detection_stats(detector, batches)"
            )
        return super().use_source_stats(stats, *names)
