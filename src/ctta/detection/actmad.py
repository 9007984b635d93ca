"""ActMAD: align the activations of a batch with those of source images, layer by layer."""

from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_fraction
from ctta.detection.detector import Detector
from ctta.detection.model import DetectionModel
from ctta.detection.source_stats import measure_layer, record_layers_, recorded_outputs
from ctta.errors import ConfigError, InputError
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats


class ActMAD(DetectionModel, StudentModel):
    """Move means and variances of the activations of each batch to those of source images, over all weights.

    The loss is the sum over norm layers of the mean distances of means and of variances (L1). Predictions are those
    before the step. The authors adapt first, and then test the last weights on all images; here every image is answered
    when it comes.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows.
        source_stats: Of :func:`ctta.detection.detection_stats`, over source images of the stream's size.
        skip: The fraction of the norm layers, from the first one on, that are not aligned; the authors skip 26 of the
            72 of YOLOv3.
        per: Compare at each ``"location"``, over the images of a batch, which needs two or more (the authors), or over
            each ``"channel"``, which also takes single images.

    Reference: Mirza et al., "ActMAD: activation matching to align distributions for test-time-training", CVPR 2023.
    """

    info = MethodInfo(
        "ActMAD",
        paper="Mirza et al., CVPR 2023",
        trains="all weights",
        forward_passes=2,
        backward_passes=1,
        num_networks=2,
        needs_source_data=True,
    )

    student: Detector

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, weight_decay=5e-4),
        skip: float = 26 / 72,
        per: Literal["location", "channel"] = "location",
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("skip", skip)
        check_choice("per", per, ("location", "channel"))
        self.skip, self.per = skip, per
        self.use_source_stats(source_stats, f"{per}.mean", f"{per}.variance")
        self.student = self.copy_of_detector()
        # A head that does not run for the features has norm layers without statistics.
        layers = [name for name in record_layers_(self.student) if f"{per}.mean/{name}" in self.source_stats.tensors]
        self.layers = layers[round(skip * len(layers)) :]
        if not self.layers:
            raise ConfigError("no norm layer runs for the features of the detector: choose another method")
        self.optimize(self.student, optimizer)

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        if self.per == "location" and len(x) == 1:
            raise InputError('statistics at each location need two or more images, got 1: give per="channel"')

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        answer = self.predict_step(x)
        with recorded_outputs() as outputs:
            self.student.features(x)
        expected, loss = self.source_stats.tensors, x.new_zeros(())
        for name in self.layers:
            measured = measure_layer(outputs[name])
            for moment in (f"{self.per}.mean", f"{self.per}.variance"):
                source = expected[f"{moment}/{name}"]
                if source.shape != measured[moment].shape:
                    raise InputError(
                        f"the source images had maps {tuple(source.shape)} in layer {name}, and these images have "
                        f'{tuple(measured[moment].shape)}: give images of one size, or per="channel"'
                    )
                loss = loss + (measured[moment] - source).abs().mean()
        self.minimize(loss)
        return answer
