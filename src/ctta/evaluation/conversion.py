"""Images and labels in the forms in which people have them, as the tensors that models and scores take."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.errors import InputError
from ctta.io.images import to_unit_floats, to_upright_rgb

CHANNELS = (1, 3, 4)  # numbers of channels that images usually have


def to_image_batch(images: Any) -> Tensor:
    """Return images, or a single image, as floats with the channels first.

    Bytes become floats in [0, 1]; floats keep their values, as a loader may have normalized them.

    Args:
        images: A tensor, a numpy array or a PIL image: (N, C, H, W), bytes also as (N, H, W, C), a single image without
            the first axis, or any other batch of floats.

    Returns:
        A float tensor.

    Raises:
        InputError: The form is not known; the message says how to convert it.
    """
    if hasattr(images, "convert"):  # a PIL image; Pillow need not be installed to check
        return to_unit_floats(np.array(to_upright_rgb(images, "an image"))[None])[0]
    if isinstance(images, list | tuple) and images and all(isinstance(x, Tensor | np.ndarray) for x in images):
        return torch.stack([to_image_batch(x) for x in images])
    if isinstance(images, np.ndarray):
        images = _from_numpy(images)
    if not isinstance(images, Tensor):
        raise InputError(
            f"expected images as a tensor, a numpy array or a PIL image, got {type(images).__name__}: yield (x, y) "
            "with x of shape (N, C, H, W)"
        )
    channels_last = images.ndim in (3, 4) and images.shape[-1] in CHANNELS and images.shape[-3] not in CHANNELS
    if images.dtype == torch.uint8:
        return (images.movedim(-1, -3) if channels_last else images).div(255)
    if not images.is_floating_point():
        raise InputError(
            f"expected images as floats or bytes, got {images.dtype}: convert them to float, such as x.float() / 255"
        )
    if channels_last:
        raise InputError(
            f"expected images (N, C, H, W), got {tuple(images.shape)} with the channels last: move them first, such as "
            "with x.movedim(-1, -3)"
        )
    return images


def to_labels(labels: Any, num_images: int) -> Tensor | None:
    """Return labels as int64, one per image or per pixel.

    Args:
        labels: A tensor, an array or a list of integers of any type, (N,), (N, 1), (N, H, W) or (N, 1, H, W); or None.
        num_images: Number of images.

    Returns:
        The labels, or None.

    Raises:
        InputError: The labels are not class indices of these images; the message says how to convert them.
    """
    if labels is None:
        return None
    if isinstance(labels, Tensor):
        indices = labels
    else:
        array = np.asarray(labels)
        if array.dtype.kind not in "iubf":
            raise InputError(
                f"labels must be class indices, got {type(labels).__name__} of {array.dtype}: map class names to "
                "0, 1, 2, ..., or yield x alone if there are no labels"
            )
        indices = _from_numpy(array)
    is_soft = indices.ndim == 2 and indices.shape[1] > 1
    if is_soft or indices.is_floating_point() or indices.is_complex():
        fix = "y.argmax(1)" if is_soft else "y.long()"
        raise InputError(
            f"labels must be class indices (N,) or label maps (N, H, W), got {indices.dtype} {tuple(indices.shape)}: "
            f"call {fix} first"
        )
    if indices.ndim in (2, 4) and indices.shape[1] == 1:
        indices = indices.squeeze(1)
    if indices.ndim not in (1, 3) or len(indices) != num_images:
        raise InputError(
            f"expected one label or label map per image, got labels of shape {tuple(indices.shape)} for {num_images} "
            "images: yield (x, y) with as many labels as images"
        )
    return indices.long()


def _from_numpy(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor; unsigned integers beyond bytes, which torch hardly supports, as int64."""
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    if array.dtype.kind not in "biuf" or array.dtype == np.longdouble:
        raise InputError(f"expected an array of numbers, got {array.dtype}: convert it to float32 or int64")
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
