"""Images of a folder in which other programs write and delete files, batch by batch."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ctta.adapt.run import InferenceBatch
from ctta.core.model import AdaptiveModel
from ctta.data.datasets.base import Rows
from ctta.data.datasets.image_files import NUM_DECODERS, ImageFiles, check_same_size, decode_file
from ctta.data.streams import Stream
from ctta.errors import DataError
from ctta.io.images import to_unit_floats

SIZE_HINT = "give --size HEIGHT WIDTH (size=) to resize them, or --batch-size 1 (batch_size=)"


@dataclass(frozen=True)
class FolderImages(ImageFiles):
    """Images of a folder in which other programs write and delete files, so that some cannot be read.

    Attributes:
        strict: Whether an image that cannot be read is an error.
        problems: Why images could not be read, by their index; empty for those that were no longer there. :meth:`read`
            returns zeros for them, so that a batch keeps its length.
    """

    strict: bool = False
    problems: dict[int, str] = field(default_factory=dict)

    @override
    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        with ThreadPoolExecutor(NUM_DECODERS) as pool:
            decoded = list(pool.map(self._decode, rows.tolist()))
        present = [position for position, pixels in enumerate(decoded) if pixels is not None]
        arrays = [pixels for pixels in decoded if pixels is not None]
        if not arrays:
            return torch.zeros(len(rows), 3, 1, 1), None
        check_same_size([self.paths[row] for row in rows[present]], arrays, hint=SIZE_HINT)
        images = to_unit_floats(np.stack(arrays))
        if len(present) == len(rows):
            return images, None
        padded = images.new_zeros(len(rows), *images.shape[1:])
        padded[present] = images
        return padded, None

    def _decode(self, row: int) -> NDArray[np.uint8] | None:
        path = self.paths[row]
        try:
            pixels = decode_file(path, self.transform)
        except DataError as error:
            is_there = path.exists()
            if is_there and self.strict:
                raise
            reason = str(error.__cause__ or error).replace(str(path), path.name)
            self.problems[row] = " ".join(reason.split()) or type(error.__cause__).__name__ if is_there else ""
            return None
        self.problems.pop(row, None)  # it may have been read too early
        return pixels


class FolderBatches:
    """Batches of a folder, without the images that could not be read.

    Args:
        stream: Batches of images.
        images: What the stream reads from.
        names: Names of the images by their index.
        model: Whose ranks share the images.

    Attributes:
        num_vanished: Images that were no longer there when they were to be read.
    """

    def __init__(self, stream: Stream, images: FolderImages, names: Sequence[str], model: AdaptiveModel) -> None:
        self.stream, self.images, self.names, self.model = stream, images, names, model
        self.num_vanished = 0

    def __iter__(self) -> Iterator[InferenceBatch]:
        for batch in self.stream:
            rows = batch.index.tolist()
            problems = self._gather_problems(rows)
            present = [position for position, row in enumerate(rows) if row not in problems]
            failed = {self.names[row]: problems[row] for row in rows if problems.get(row)}
            self.num_vanished += len(problems) - len(failed)
            x = batch.x if len(present) == len(rows) else batch.x[present]
            names = [self.names[rows[position]] for position in present]
            yield InferenceBatch(x if present else None, names, failed=failed, num_read=len(rows))

    def _gather_problems(self, rows: list[int]) -> dict[int, str]:
        """Return why images of a batch could not be read, on whichever rank."""

        def find_problems() -> list[tuple[int, str]]:
            return [(row, self.images.problems[row]) for row in rows if row in self.images.problems]

        by_rank = self.model.coordinator.all_gather_object(find_problems)
        return {row: problem for row, problem in chain(*by_rank)}
