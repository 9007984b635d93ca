"""Passes of the source network over single images, which requests of several streams share."""

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.norms import uses_batch_statistics
from ctta.serve.errors import is_out_of_memory

logger = logging.getLogger("ctta.serve")

MAX_ROWS = 8  # images in a pass; more are hardly faster on a CPU
MAX_PADDED_ROWS = 2  # images that a single one may be padded to, for the same rounding as in company
MAX_SHAPES = 16  # whose rounding is remembered; images of other shapes do not share passes


class SourcePasses:
    """Predict images with the source network as it was trained, single images of one shape several at a time.

    Libraries round a product with a vector in another way than one with a matrix, so an image that comes alone would
    get other last bits than one in company. A probe with random images finds out, once for each shape, from how many
    rows on a row does not depend on the number of rows, bit for bit. If that is one or two, a single image is predicted
    in passes of at least that size, and its logits are the same with any company or none. Otherwise images of the
    shape are predicted one by one.

    Args:
        network: The source network; its predictions must not depend on the other images of a batch.
        template: Model that every stream is a fork of.
    """

    def __init__(self, network: nn.Module, template: AdaptiveModel) -> None:
        self.network = network
        self._template = template
        self._min_rows: dict[tuple[int, ...], int | None] = {}
        self._starts_as_source: dict[tuple[int, ...], bool] = {}
        self._start = {
            name: value for name, value in template.unwrapped.state_dict().items() if isinstance(value, Tensor)
        }
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of a batch, or of a single image as it would be in company."""
        min_rows = self.min_rows(x) if len(x) == 1 else None
        if min_rows is None:
            logits: Tensor = self.network(x)
            return logits
        return self._run([x] * min_rows)[:1]

    def predict_each(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of several single images of one shape.

        Args:
            images: Batches of one, at most :data:`MAX_ROWS`.

        Returns:
            What a call returns for each.
        """
        if len(images) == 1 or self.min_rows(images[0]) is None:
            return [self(image) for image in images]
        size = largest_pass(len(images))
        with torch.no_grad():
            logits = self._run(images[:size]).split(1)
        return [*logits, *(self.predict_each(images[size:]) if len(images) > size else [])]

    def _run(self, images: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.network(torch.cat(list(images)))
        return logits

    def min_rows(self, x: Tensor) -> int | None:
        """Return the number of rows from which on they do not depend on it; None if images do not share passes.

        Args:
            x: Images of the shape in question.
        """
        shape = tuple(x.shape[1:])
        with self._lock:
            if shape not in self._min_rows and len(self._min_rows) < MAX_SHAPES:
                self._min_rows[shape] = self._probe(x)
            return self._min_rows.get(shape)

    def may_share(self, x: Tensor) -> bool:
        """Return False if a probe has found that images of this shape do not share passes."""
        return self._min_rows.get(tuple(x.shape[1:]), 1) is not None

    def starts_as_source(self, x: Tensor, *, probe: bool) -> bool:
        """Return whether a stream that has learned nothing predicts single images as the source does.

        Args:
            x: Images of the shape in question.
            probe: Whether to find out, which takes some passes; otherwise False if it is not known yet.
        """
        shape = tuple(x.shape[1:])
        if uses_batch_statistics(self._template.source) or not self.may_share(x):
            return False
        if not probe or self.min_rows(x) is None:
            return self._starts_as_source.get(shape, False)
        with self._lock:
            if shape not in self._starts_as_source:
                model, images = self._template.fork(), _random_images(x)
                self._starts_as_source[shape] = all(
                    torch.equal(model.predict(images[:size]), self.network(images[:size])) for size in (1, MAX_ROWS)
                )
            return self._starts_as_source[shape]

    def is_start(self, model: AdaptiveModel) -> bool:
        """Return whether a model has the state of a new stream.

        Args:
            model: The model of a stream.
        """
        state = model.unwrapped.state_dict()
        return all(torch.equal(state[name], value) for name, value in self._start.items())

    @torch.no_grad()
    def _probe(self, x: Tensor) -> int | None:
        images, found = _random_images(x), MAX_ROWS
        try:
            whole = self.network(images)
        except Exception as error:
            if is_out_of_memory(error):  # there is enough for one image, perhaps
                return None
            raise
        while found > 1:
            size = found // 2
            parts = [slice(0, size), slice(MAX_ROWS - size, MAX_ROWS)]
            if not all(torch.equal(self.network(images[part]), whole[part]) for part in parts):
                break
            found = size
        if found <= MAX_PADDED_ROWS:
            return found
        logger.info("images of shape %s are predicted one by one: rounding depends on their number", tuple(x.shape[1:]))
        return None


def _random_images(x: Tensor) -> Tensor:
    """Return as many images as a pass takes at most, like those of a batch."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(MAX_ROWS, *x.shape[1:], generator=generator).to(x)


def largest_pass(num_images: int) -> int:
    """Return the largest power of two, whose rounding was probed, that is not above a number of images.

    >>> [largest_pass(count) for count in (1, 2, 3, 7, 8, 9)]
    [1, 2, 2, 4, 8, 8]
    """
    return min(1 << (num_images.bit_length() - 1), MAX_ROWS)
