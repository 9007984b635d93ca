"""The guard around a method for detectors."""

from torch import Tensor, nn

from ctta.checkpoint.manifest import register_wrapper
from ctta.detection.model import DetectionModel
from ctta.guard.guarded import Guarded


class GuardedDetector(DetectionModel, Guarded):
    """A method for detectors with the checks and remedies of :class:`ctta.Guarded`, which has the same arguments.

    It looks at which class covers each cell of a grid over the images, by the method and by the source. An alarm is
    raised if these differ more often than the source's own uncertainty explains, or if the method loses classes that
    the source still finds: no boxes where there were some, or boxes everywhere. The order of scenes is no alarm.

    >>> import ctta, torch
    >>> from ctta.detection import YOLOv5
    >>> model = GuardedDetector(ctta.detect(YOLOv5(num_classes=3, width=0.125)), bad_rows="source")
    >>> len(model(torch.rand(2, 3, 64, 64)))
    2
    """

    def _take_source(self, net: nn.Module) -> tuple[nn.Module, set[str]]:
        return Guarded._take_source(self, net)

    def judged_logits(self, answer: Tensor, x: Tensor) -> Tensor:
        """Return what the method inside is judged by.

        Args:
            answer: The boxes as one tensor.
            x: The images.
        """
        return self.wrapped.judged_logits(answer, x)


register_wrapper("guarded_detector", GuardedDetector, load_only=("audit",))
