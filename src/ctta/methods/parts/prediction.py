"""Methods that predict with one network, as it is when the batch arrives."""

from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel


class SourceModel(AdaptiveModel):
    """A method that learns nothing by gradients: what it predicts is its step."""

    checks_values_late = True

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        return self.predict_step(x)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.source(x)
        return logits


class StudentModel(AdaptiveModel):
    """A method that returns the predictions of its student before the student learns from them."""

    student: nn.Module

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits
