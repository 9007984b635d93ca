"""Detectors that learn nothing, or only the statistics of their BatchNorms."""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import read_flags
from ctta.core.updates import Step
from ctta.core.validation import check_positive
from ctta.detection.boxes import pack, suppress, unpack
from ctta.detection.model import DetectionModel
from ctta.methods import VANE, BNStats, Source
from ctta.methods.vane.method import VaneState
from ctta.views import Model

#: Boxes of a class in views of an image that overlap more than this are one.
MAX_VIEW_OVERLAP = 0.6


class SourceDetector(DetectionModel, Source):
    """The detector as it was trained.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows.
    """

    info = MethodInfo("Source")


class BNStatsDetector(DetectionModel, BNStats):
    """Normalize by the statistics of each batch, blended with the source's; nothing is learned.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows. Without BatchNorm layers it
            predicts as it was trained, and a warning says so.
        batch_stats: The fraction m of the batch in the statistics, (1-m) * running + m * batch. The default ``"auto"``
            uses only the batch from 16 images on, and fewer images the less, the fewer they are; 1 for only the batch.
    """

    info = MethodInfo("BN Stats Adapt", paper="Schneider et al., NeurIPS 2020")
    needs_batch_norm = True


class ShiftStatisticsDetector(DetectionModel, VANE):
    """Normalize by a mean of the source's statistics and those of recent images, as the default for classifiers does.

    The further the recent images are from what the source saw in training, the more they count. When pixels show a
    new domain, older images are forgotten. Images far outside of what the source has seen, such as those of a broken
    sensor, are answered by the source and change nothing. Nothing is learned by gradients, and single images suffice.

    The source also looks at each image at smaller sizes, where noise and blur are smaller too, for less than half of a
    pass. Of boxes that several looks find, the surest counts.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows. Without BatchNorm layers it
            predicts as it was trained, and a warning says so.
        tolerance: The distance from the source's statistics at which layers go half of the way that they go at most;
            None to keep the source's statistics.
        horizon: How many images the statistics of the stream remember.
        max_distance: The distance in brightness, contrast and sharpness at which images belong to a new domain; None to
            detect no domains.
        scales: The sizes of the further looks, relative to what the detector usually sees; () for none.
    """

    info = MethodInfo("Shift statistics", forward_passes="1 + views", num_networks=2)
    needs_batch_norm = True
    presets: ClassVar = {}

    def __init__(
        self,
        net: nn.Module,
        *,
        tolerance: float | None = 0.025,
        horizon: float = 64.0,
        max_distance: float | None = 0.5,
        scales: Sequence[float] = (0.5, 0.35),
        **common: Unpack[PassArguments],
    ) -> None:
        # What else VANE does needs one prediction for each image, or views that align predictions.
        switched_off = {"views": (), "pixel_views": (), "learn": False}
        shift = {"tolerance": tolerance, "horizon": horizon, "max_distance": max_distance}
        super().__init__(net, **shift, **switched_off, **common)  # type: ignore[arg-type]
        for scale in scales:
            check_positive("scales", scale)
        self.scales = tuple(scales)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        return self._add_views(super().adapt_step(x), x)

    @override
    def _answer(self, x: Tensor, student: Model) -> Tensor:
        return self._add_views(super()._answer(x, student), x)

    @torch.no_grad()
    def _add_views(self, answer: Tensor, x: Tensor) -> Tensor:
        """Return boxes without those that overlap a surer one, with what the source finds at other sizes.

        It is the source that looks, because statistics of another size are not those of the stream.
        """
        if not self.scales:
            return answer
        most = self.source.max_detections
        looks = [pack(self.source.predict_scaled(x, scale), most) for scale in self.scales]
        every = torch.cat([answer, *looks], 1)
        order = every[..., 4].argsort(dim=1, descending=True, stable=True)  # places without a box come last
        found = unpack(every.gather(1, order[..., None].expand_as(every)))
        return pack(suppress(found, MAX_VIEW_OVERLAP, most), most)

    @override
    def _store(self, state: VaneState) -> None:
        # A network that computes NaN finds no boxes, so that what it answers is finite.
        flags = [each.isfinite().all() for layer in state.layers.values() for each in layer]
        is_finite = not flags or read_flags(torch.stack(flags).all())[0]
        self.last_step = Step(torch.zeros(()), skipped=not is_finite)
        if is_finite:
            super()._store(state)
        else:
            self.num_skipped += 1
