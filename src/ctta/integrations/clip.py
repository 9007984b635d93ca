"""Zero-shot classifiers from models of images and text: CLIP and SigLIP of transformers, and models of OpenCLIP.

Neither library is imported: the models are given.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.models.zero_shot import TEMPLATES, ZeroShot, class_vectors, zero_shot


class TransformersImages(nn.Module):
    """The image encoder of a CLIP or SigLIP of transformers: from images to features in the space of the text.

    Args:
        model: The model; its parts are shared, not copied.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_model = model.vision_model
        self.projection = getattr(model, "visual_projection", nn.Identity())  # SigLIP has none

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the features (N, d) of images."""
        features: Tensor = self.projection(self.vision_model(pixel_values=images).pooler_output)
        return features


def from_transformers(
    model: Any, tokenizer: Any, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> ZeroShot:
    """Return a zero-shot classifier from a CLIP or SigLIP of transformers.

    It takes images as the model's image processor prepares them. Let it take images in [0, 1], as views and
    corruptions do, by ``ctta.models.Normalized(net, processor.image_mean, processor.image_std)``.

    Args:
        model: A ``CLIPModel``, ``SiglipModel`` or ``Siglip2Model`` of fixed resolution.
        tokenizer: Its tokenizer or processor.
        names: The names of the classes.
        templates: Texts with ``{}`` in the place of the name.

    Returns:
        The network; the text encoder is not part of it.

    Raises:
        ConfigError: It is another kind of model.
    """
    _require(model, "vision_model", "get_text_features", "logit_scale")
    device = model.logit_scale.device

    def encode_text(texts: list[str]) -> Tensor:
        # SigLIP was trained with texts of one length, and CLIP masks the rest.
        tokens = tokenizer(text=texts, padding="max_length", truncation=True, return_tensors="pt")
        found = model.get_text_features(**{name: value.to(device) for name, value in tokens.items()})
        vectors: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return vectors

    return _build(TransformersImages(model), model, class_vectors(encode_text, names, templates))


def from_open_clip(model: Any, tokenizer: Any, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> ZeroShot:
    """Return a zero-shot classifier from a model of OpenCLIP.

    It takes images as the model's ``preprocess`` prepares them; see :func:`from_transformers` on images in [0, 1].

    Args:
        model: What ``open_clip.create_model_and_transforms(NAME)`` returns first.
        tokenizer: What ``open_clip.get_tokenizer(NAME)`` returns.
        names: The names of the classes.
        templates: Texts with ``{}`` in the place of the name.

    Returns:
        The network; the text encoder is not part of it.

    Raises:
        ConfigError: It is another kind of model.
    """
    _require(model, "visual", "encode_text", "logit_scale")
    device = model.logit_scale.device
    vectors = class_vectors(lambda texts: model.encode_text(tokenizer(texts).to(device)), names, templates)
    return _build(model.visual, model, vectors)


def _require(model: Any, *names: str) -> None:
    if missing := [name for name in names if not hasattr(model, name)]:
        raise ConfigError(
            f"expected a model of images and text with {', '.join(names)}; this {type(model).__name__} has no "
            f"{', '.join(missing)}. Give an image encoder and class vectors to ctta.zero_shot"
        )


@torch.no_grad()
def _build(encoder: nn.Module, model: Any, vectors: Tensor) -> ZeroShot:
    return zero_shot(encoder, vectors, scale=float(model.logit_scale.exp())).eval()
