"""What :func:`ctta.evaluate` accepts besides streams: loaders, datasets, arrays, lists and generators.

They become :class:`PlainBatches`: batches in the order in which they come, read once. Nothing tells beforehand which
batches these are, so their hash is computed while they are read. Images and labels are converted to tensors.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ctta.core.model import AdaptiveModel
from ctta.core.validation import check_integer
from ctta.data.streams import Batch, EndlessStream, Stream, in_memory
from ctta.errors import ConfigError, InputError
from ctta.io.images import to_unit_floats, to_upright_rgb
from ctta.methods import Source
from ctta.nn.surgery import infer_input_rank

CHANNELS = (1, 3, 4)  # numbers of channels that images usually have


def to_image_batch(images: Any) -> Tensor:
    """Return images, or a single image, as floats with the channels first.

    They are a tensor, a numpy array or a PIL image: (N, C, H, W), bytes also as (N, H, W, C), a single image without
    the first axis, or any other batch of floats. Bytes become floats in [0, 1]; floats keep their values, as a loader
    may have normalized them.
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
    """Return labels as int64, one per image or per pixel, if there are any.

    They are a tensor, an array or a list of integers of any type, (N,), (N, 1), (N, H, W) or (N, 1, H, W).
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


BATCH_SIZE = 32  # of single images
DOMAIN = "all"  # of batches that name none

#: Where dictionaries have images and labels, as in Hugging Face datasets.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
LABEL_KEYS = ("labels", "label", "y")


class PlainBatches:
    """Batches of anything that can be iterated, read once.

    Items are batches ``(x, y)`` or ``x``, :class:`ctta.data.streams.Batch`, or single images, to be put together in
    batches of ``batch_size``; those have one axis less than ``rank``, which the network expects, if known.
    """

    def __init__(
        self,
        items: Iterable[Any],
        name: str,
        *,
        rank: int | None,
        batch_size: int | None,
        class_names: tuple[str, ...] = (),
    ) -> None:
        self.items, self.name, self.rank, self.class_names = items, name, rank, class_names
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size, 1)
        self.domains: list[str] = []
        self._digest = hashlib.sha256()

    @property
    def segment(self) -> int:
        """Index of the segment of the last batch: domains follow one another, as batches name them."""
        return len(self.domains) - 1

    @property
    def num_batches(self) -> int | None:
        """Number of batches, if a loader knows it."""
        try:
            return len(self.items) if isinstance(self.items, DataLoader) else None
        except TypeError:  # a loader of an iterable dataset
            return None

    @property
    def hash(self) -> str:
        """Hash of all batches read so far."""
        return self._digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[Batch]:
        num_images = 0
        for x, y, domain in self._collate():
            if len(x) == 0:
                continue
            if not self.domains or domain != self.domains[-1]:
                self.domains.append(domain)
            for tensor in (x, y):
                if tensor is not None:
                    self._digest.update(f"{domain} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    self._digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            yield Batch(x, y, domain, torch.arange(num_images, num_images + len(x)))
            num_images += len(x)

    def _collate(self) -> Iterator[tuple[Tensor, Tensor | None, str]]:
        """Yield batches, of single images as soon as there are enough."""
        pending: list[tuple[Tensor, Tensor | None]] = []
        for item in self.items:
            if isinstance(item, Batch):
                yield item.x, item.y, item.domain
                continue
            images, labels = _split(item)
            x = to_image_batch(images)
            is_single = _is_scalar(labels) or (labels is None and x.ndim + 1 == (self.rank or 4) and x.ndim == 3)
            if not is_single:
                if self.batch_size is not None:
                    raise ConfigError(
                        f"batch_size={self.batch_size} is for single images, and {self.name} yields batches: set the "
                        "batch size there"
                    )
                yield x, to_labels(labels, len(x)), DOMAIN
                continue
            pending.append((x, None if labels is None else to_labels([int(labels)], 1)))
            if len(pending) == (self.batch_size or BATCH_SIZE):
                yield _stack(pending)
                pending = []
        if pending:
            yield _stack(pending)


def as_model(model: Any) -> AdaptiveModel:
    """Return a model as it is, and a plain network as :class:`ctta.Source`; raise a TypeError for anything else."""
    if isinstance(model, AdaptiveModel):
        return model
    if isinstance(model, nn.Module):
        return Source(model)
    if isinstance(model, str) or (isinstance(model, type) and issubclass(model, AdaptiveModel)):
        name = repr(model) if isinstance(model, str) else f"the class {model.__name__}"
        raise TypeError(
            f"expected a model or a network, got {name}: wrap your network, such as ctta.adapt(net, 'tent')"
        )
    raise TypeError(
        f"expected a model, such as ctta.Tent(net), or a network (torch.nn.Module), got {type(model).__name__}: give "
        "the model first and the data second"
    )


def as_batches(data: Any, model: AdaptiveModel, batch_size: int | None) -> Stream | PlainBatches:
    """Return a stream as it is, and anything else that :func:`ctta.evaluate` accepts as batches that are read once."""
    if isinstance(data, Stream):
        if batch_size is not None:
            raise ConfigError(
                f"the stream has batches of {data.batch_size}: set batch_size where you create the stream"
            )
        return data
    rank = infer_input_rank(model.source)
    if (arrays := _find_arrays(data)) is not None:
        return _from_arrays(*arrays, rank, BATCH_SIZE if batch_size is None else batch_size)
    _refuse_other_things(data)
    dataset = data.dataset if isinstance(data, DataLoader) else data
    classes = getattr(dataset, "classes", ())
    class_names = tuple(classes) if all(isinstance(name, str) for name in classes) else ()
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        # A dataset has no order of its own, and many list class after class, which no method adapts to well.
        sized: Any = data
        order = np.random.default_rng(0).permutation(len(sized)).tolist()
        size = BATCH_SIZE if batch_size is None else batch_size
        name = f"{type(data).__name__} shuffled batch={size}"
        items = (sized[place] for place in order)
        return PlainBatches(items, name, rank=rank, batch_size=size, class_names=class_names)
    given_name = getattr(data, "name", None)
    name = given_name if isinstance(given_name, str) else type(data).__name__
    if isinstance(data, DataLoader):
        name = f"DataLoader({type(dataset).__name__}) batch={data.batch_size}"
    return PlainBatches(data, name, rank=rank, batch_size=batch_size, class_names=class_names)


def _find_arrays(data: Any) -> tuple[Any, Any] | None:
    """Return images and labels, if the data is an array of images or a pair of arrays; else None."""
    if _is_array(data):
        return data, None
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[0]) and data[0].ndim >= 2:
        images, labels = data
        if _is_array(labels) and labels.ndim < images.ndim and len(labels) == len(images):
            return images, labels
        if isinstance(labels, list) and len(labels) == len(images) and all(_is_scalar(label) for label in labels):
            return images, np.asarray(labels)
    return None


def _from_arrays(images: Any, labels: Any, rank: int | None, batch_size: int) -> Stream | PlainBatches:
    """Return byte images as a stream, which has a hash and resumes, and other arrays as batches."""
    batch_size = check_integer("batch_size", batch_size, 1)
    is_bytes = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3
    y = to_labels(labels, len(images))
    if is_bytes and (y is None or y.ndim == 1):
        return in_memory(images, None if y is None else y.cpu().numpy(), name="arrays", batch_size=batch_size)
    if rank is not None and images.ndim + 1 == rank:
        images = images[None]
    parts = range(0, len(images), batch_size)
    items = [
        (images[start : start + batch_size], None if y is None else y[start : start + batch_size]) for start in parts
    ]
    return PlainBatches(items, f"arrays batch={batch_size}", rank=rank, batch_size=None)


def _refuse_other_things(data: Any) -> None:
    """Raise a TypeError that says what to do for what cannot be iterated as batches."""
    if isinstance(data, nn.Module):
        raise TypeError("got a network where data is expected: give the model first and the data second")
    if isinstance(data, str | PathLike):
        raise TypeError(
            f"expected data, got the path {str(data)!r}: open it with "
            "ctta.data.streams.image_folder(path, size=(224, 224)) "
            "for a tree <class>/<image>, or ctta.data.streams.folder(path) for images without labels"
        )
    if isinstance(data, EndlessStream):
        raise ConfigError(f"{data.name} is endless: build it with num_images=N to evaluate it")
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:5]))
        raise TypeError(f"expected batches, got a dictionary with {keys}: give a pair (images, labels) of its arrays")
    if not isinstance(data, Dataset) and hasattr(data, "domain") and not hasattr(data, "__iter__"):
        raise TypeError(
            f"expected a stream, got the dataset {type(data).__name__}: give it an order, such as "
            "ctta.data.streams.continual(data)"
        )
    if not (isinstance(data, Dataset) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TypeError(
            f"expected a stream of ctta.data.streams, a DataLoader, or an iterable of batches (x, y) or x, got "
            f"{type(data).__name__}"
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
        raise TypeError(f"the dataset {type(data).__name__} has no length: wrap it in a DataLoader with a sampler")


def _split(item: Any) -> tuple[Any, Any]:
    """Return images and labels of one item of an iterable; None for labels that are not there."""
    if isinstance(item, Mapping):
        image_key = next((key for key in IMAGE_KEYS if key in item), None)
        if image_key is None:
            raise InputError(
                f"expected batches (x, y) or x, got a dictionary with {', '.join(map(repr, item))}: yield tuples, or "
                f"name the images {IMAGE_KEYS[0]!r} and the labels {LABEL_KEYS[0]!r}"
            )
        return item[image_key], next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, tuple | list):
        if not item:
            raise InputError("expected batches (x, y) or x, got an empty tuple: yield images first, then labels")
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _stack(pending: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None, str]:
    """Return one batch of single images."""
    images = [x for x, _y in pending]
    labels = [y for _x, y in pending if y is not None]
    if different := [tuple(x.shape) for x in images if x.shape != images[0].shape]:
        raise InputError(
            f"images in a batch must have the same size, got {tuple(images[0].shape)} and {different[0]}: "
            "resize them in the dataset's transform"
        )
    if labels and len(labels) < len(images):
        raise InputError(f"{len(labels)} of {len(images)} images of a batch have labels: label all of them, or none")
    return torch.stack(images), torch.cat(labels) if labels else None, DOMAIN


def _is_array(thing: Any) -> bool:
    return isinstance(thing, Tensor | np.ndarray)


def _is_scalar(label: Any) -> bool:
    """Return whether a label is that of one image."""
    return isinstance(label, int | np.integer) or (_is_array(label) and label.ndim == 0)
