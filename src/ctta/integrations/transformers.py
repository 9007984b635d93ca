"""Adapt within a pipeline of transformers; needs that library, as in the extra ``segmentation``."""

from typing import Any, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.registry import DEFAULT_METHOD, adapt
from ctta.errors import ConfigError

#: Outputs by what a network labels: images or pixels.
_OUTPUTS = {2: "ImageClassifierOutput", 4: "SemanticSegmenterOutput"}
Pipeline = TypeVar("Pipeline")


class AdaptedPretrainedModel(nn.Module):
    """An adaptive model with the interface that pipelines expect of a network of transformers.

    Args:
        model: A model around a network of transformers.

    Attributes:
        model: The adaptive model, to save, reset or freeze.
    """

    def __init__(self, model: AdaptiveModel) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, pixel_values: Tensor, **inputs: Any) -> Any:
        """Predict a batch and adapt to it.

        Args:
            pixel_values: Images as the image processor prepares them.
            **inputs: Nothing else is supported.

        Returns:
            The output of transformers with ``logits``.
        """
        from transformers import modeling_outputs

        if given := [name for name, value in inputs.items() if value is not None]:
            raise ConfigError(f"methods adapt to pixel_values only, got {', '.join(given)}")
        logits = self.model(pixel_values)
        return getattr(modeling_outputs, _OUTPUTS[logits.ndim])(logits=logits)

    def __getattr__(self, name: str) -> Any:
        """Return what the network itself has, such as ``config`` and ``device``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model: Any = super().__getattr__("model")
            return getattr(model.source, name)


def adapt_pipeline(pipeline: Pipeline, method: str | AdaptiveModel | None = None, **hyperparameters: Any) -> Pipeline:
    """Let a pipeline for image classification or segmentation adapt to the images that it is given.

    Its ``model`` is replaced, which is where the adaptive model is found::

        classify = adapt_pipeline(transformers.pipeline("image-classification", NAME), "tent")
        classify(images, batch_size=16)
        ctta.save(classify.model.model, "camera7.safetensors")

    The image processor normalizes images before the network sees them: tell the views of methods that have some, such
    as ``views=ctta.views.image_views(32, mean=processor.image_mean, std=processor.image_std)``.

    Args:
        pipeline: The pipeline. Its ``model`` is replaced; its network is copied and not changed.
        method: A name for :func:`ctta.adapt`, or a model around the network, such as :func:`ctta.load` returns.
        **hyperparameters: Keyword arguments of the method.

    Returns:
        The same pipeline.
    """
    any_pipeline: Any = pipeline
    if isinstance(method, AdaptiveModel):
        model = method
    else:
        model = adapt(any_pipeline.model, method or DEFAULT_METHOD, **hyperparameters)
    any_pipeline.model = AdaptedPretrainedModel(model).to(any_pipeline.model.device)
    return pipeline
