"""Classify images by text: the features of an image encoder are compared with a vector per class.

>>> encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 6))
>>> net = zero_shot(encoder, torch.eye(6)[:4])
>>> net(torch.rand(2, 3, 4, 4)).shape
torch.Size([2, 4])
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.validation import check_positive
from ctta.errors import ConfigError
from ctta.functional import at_least_float32

#: Texts of a class, with ``{}`` in the place of its name; the vector of the class is the mean of theirs.
TEMPLATES = (
    "a photo of a {}.",
    "a blurry photo of a {}.",
    "a low resolution photo of a {}.",
    "a bright photo of a {}.",
    "a dark photo of a {}.",
    "a close-up photo of a {}.",
    "a cropped photo of a {}.",
)


class ZeroShot(nn.Module):
    """A network whose logits are the cosines of image features with class vectors, times a scale.

    The last layer is linear: its input are features of length 1, and its rows are the class vectors times the scale. It
    is the classifier for methods that use one, and does not require grad, so that no method trains it.

    Args:
        image_encoder: A network from images to features (N, d); it becomes a part of this one.
        class_vectors: One per class (C, d), of any length.
        scale: What the cosines are multiplied by; 100 for CLIP.
    """

    def __init__(self, image_encoder: nn.Module, class_vectors: Tensor, scale: float = 100.0) -> None:
        super().__init__()
        self.image_encoder = image_encoder
        rows = scale * F.normalize(class_vectors.detach(), dim=1)
        # Without torch's own initialization, which would draw from the global generator.
        self.head: nn.Linear = nn.utils.skip_init(nn.Linear, rows.shape[1], len(rows), bias=False, dtype=rows.dtype)
        self.head.requires_grad_(False)
        self.head.get_parameter("weight").copy_(rows)
        self.to(next(image_encoder.parameters(), rows).device)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, C) of images."""
        features = self.image_encoder(images)
        if not isinstance(features, Tensor) or features.ndim != 2 or features.shape[1] != self.head.in_features:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(
                f"the image encoder must return features (N, {self.head.in_features}), as long as the class vectors, "
                f"got {found}: give the part that ends with the projection to the space of the text"
            )
        logits: Tensor = self.head(F.normalize(at_least_float32(features), dim=1).to(self.head.weight.dtype))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the linear layer; an encoder may have layers that look like one."""
        return self.head


def zero_shot(image_encoder: nn.Module, class_vectors: Tensor, *, scale: float = 100.0) -> ZeroShot:
    """Return a network that classifies images by the class vectors of a text encoder.

    Every method adapts it: ``ctta.adapt(ctta.zero_shot(encoder, vectors), "tda")``. Class vectors come from
    :func:`ctta.models.class_vectors`; :mod:`ctta.integrations.clip` takes whole models apart.

    Args:
        image_encoder: A network from images to features (N, d).
        class_vectors: One per class (C, d); they are scaled to length 1.
        scale: What the cosines are multiplied by; 100 for CLIP.

    Returns:
        The network.

    Raises:
        ConfigError: The class vectors are not one finite row per class.
    """
    check_positive("scale", scale)
    if class_vectors.ndim != 2 or len(class_vectors) < 2 or not class_vectors.is_floating_point():
        raise ConfigError(f"expected class vectors (C, d) of at least 2 classes, got {tuple(class_vectors.shape)}")
    if not (class_vectors.isfinite().all() and class_vectors.any(1).all()):
        raise ConfigError("class vectors must be finite, and none may be zero")
    return ZeroShot(image_encoder, class_vectors, scale)


@torch.no_grad()
def class_vectors(
    encode_text: Callable[[list[str]], Any], names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Tensor:
    """Return the mean of the text vectors of each class over templates.

    Args:
        encode_text: A function from texts to their vectors (n, d).
        names: The names of the classes.
        templates: Texts with ``{}`` in the place of the name.

    Returns:
        Vectors of length 1 (C, d).

    Raises:
        ConfigError: There are no names or templates, or a template has no place for the name.

    >>> class_vectors(lambda texts: torch.tensor([[len(text), 1.0] for text in texts]), ["cat", "bird"], ["a {}"]).shape
    torch.Size([2, 2])
    """
    if not names or not templates or any("{}" not in template for template in templates):
        raise ConfigError(f"expected names and templates such as 'a photo of a {{}}.', got {names} and {templates}")
    rows = []
    for name in names:
        vectors = at_least_float32(encode_text([template.format(name) for template in templates]))
        rows.append(F.normalize(F.normalize(vectors, dim=1).mean(0), dim=0))
    return torch.stack(rows)
