"""Adapt a network to a folder of images and write a prediction for each; resumable after any interruption."""

import csv
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from ctta.adapt.label_maps import check_num_classes, maps_folder
from ctta.adapt.options import FolderOptions
from ctta.adapt.predictions import ERROR, SHARE, PredictionFile, answer_columns
from ctta.adapt.resume import check_arguments, open_run
from ctta.adapt.run import InferenceBatch, InferenceRun, InferenceSummary
from ctta.core.options import takes_options
from ctta.data.datasets.base import Rows
from ctta.data.datasets.image_files import (
    NUM_DECODERS,
    ImageFiles,
    Order,
    check_order,
    check_same_size,
    decode_file,
    find_images,
    is_class_tree,
    sort_images,
)
from ctta.data.streams import Segment, Stream
from ctta.distributed import init
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError, DataError, annotate_network_errors
from ctta.evaluation.steps import feed
from ctta.io.images import Resize, to_unit_floats
from ctta.methods import Source
from ctta.nn.surgery import find_weight

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

    def list_problems(self, rows: Sequence[int]) -> list[tuple[int, str]]:
        """Return which of some images this process could not read, and why."""
        return [(row, self.problems[row]) for row in rows if row in self.problems]

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


READ_AHEAD = 2  # batches


@takes_options(FolderOptions)
def adapt_folder(
    net: nn.Module, images: str | os.PathLike[str], out: str | os.PathLike[str], options: FolderOptions
) -> InferenceSummary:
    """Predict every image of a folder while adapting, and write a CSV file.

    With ``state`` the adapted model is saved regularly. Called again after an interruption, the function resumes with
    the remaining images, and the file ends up identical to that of an uninterrupted call; called again later, it
    processes the images that were added since. Another folder with another ``out`` continues the same stream. Under
    ``torchrun`` the ranks share each batch, and the first one writes the files.

    Args:
        net: Source network; takes images in [0, 1] and returns logits (N, classes), or (N, classes, H, W) per pixel.
        images: Folder of images, searched recursively.
        out: CSV file to write, with the columns image, batch, class, confidence and error. For a network that answers
            per pixel, the class of most pixels, the mean confidence, and the share of the pixels of each class; label
            maps are written to a folder of the same name that ends in ``.maps``, one PNG with a palette per image.
        options: The fields of :class:`FolderOptions` as keywords.

    Returns:
        What this call did.

    Raises:
        ConfigError: If an argument is not valid, or contradicts the saved state or an existing ``out``.
        OSError: If a file cannot be written, for instance because the disk is full. The table then ends with a whole
            batch, and the next call resumes from the last saved state.
        DataError: If there are no images or, with ``strict``, one cannot be read.
    """
    check_arguments(Path(out), options)
    check_order(options.order)
    init()
    # Rank zero lists the files: while images are being added, each rank would find different ones.
    root = Path(images)
    names, order = run_on_rank_zero(lambda: _list_images(root, options.order))
    resize = Resize(options.size) if options.size else None
    files = FolderImages(root.name, tuple(root / name for name in names), None, resize, strict=options.strict)
    shares = run_on_rank_zero(lambda: _name_shares(net, files, Path(out), options))
    columns = answer_columns(with_names=bool(options.classes), compare=options.compare, share_names=shares)
    file = PredictionFile(Path(out), [*columns, ERROR], escape_formulas=options.escape_formulas)
    maps = maps_folder(Path(out)) if shares else None
    if maps is not None and maps.absolute().is_relative_to(root.absolute()):
        raise ConfigError(f"label maps are written to {maps}, among the images: write the table to another folder")
    with open_run(
        net,
        file,
        options,
        images=names,
        compare=options.compare,
        read_first_batch=lambda: _read_first_batch(files, options.batch_size),
        is_readable=partial(_is_readable, root),
        allow_pixels=maps is not None,
    ) as run:
        run.maps = maps
        done = set(run.processed)
        remaining = np.array([row for row, name in enumerate(names) if name not in done], np.int64)
        if len(remaining):
            segment = Segment(root.name, files, remaining)
            stream = Stream(root.name, [segment], batch_size=options.batch_size, read_ahead=READ_AHEAD)

            def on_batch(num_done: int) -> None:
                if options.on_progress:
                    options.on_progress(len(done) + num_done, len(done) + len(remaining))

            run.process(_iter_batches(stream, files, names, run), on_batch)
        return run.summarize(num_before=len(done) - run.num_unreadable, order=order)


def _iter_batches(
    stream: Stream, images: FolderImages, names: Sequence[str], run: InferenceRun
) -> Iterator[InferenceBatch]:
    """Yield batches without the images that could not be read, on whichever rank; count those that are gone."""
    for batch in feed(stream, find_weight(run.model.source).device):
        rows = batch.index.tolist()
        found = run.model.coordinator.all_gather_object(partial(images.list_problems, rows))
        problems = dict(chain(*found))
        present = [position for position, row in enumerate(rows) if row not in problems]
        failed = {names[row]: problems[row] for row in rows if problems.get(row)}
        run.num_vanished += len(problems) - len(failed)
        x = batch.x if len(present) == len(rows) else batch.x[present]
        read = [names[rows[position]] for position in present]
        yield InferenceBatch(x if present else None, read, failed=failed, num_read=len(rows))


def _list_images(root: Path, order: Order | None) -> tuple[list[str], Order]:
    """Return the names of the images of a folder in their order, and which order that is."""
    names = [path.relative_to(root).as_posix() for path in find_images(root)]
    chosen = order or ("shuffle" if is_class_tree(names) else "name")
    return [names[position] for position in sort_images(root, names, chosen)], chosen


def _read_first_batch(files: FolderImages, batch_size: int) -> Tensor | None:
    rows = np.arange(min(batch_size, len(files)))
    images, _ = files.read(rows)
    present = [row for row in rows.tolist() if row not in files.problems]
    return images[present] if present else None


def _name_shares(net: nn.Module, files: FolderImages, out: Path, options: FolderOptions) -> list[str]:
    """Return what the classes are called in the columns for their shares; none for a network with one answer per image.

    An existing table says so itself; else the network is asked about the first batch.
    """
    if out.exists():
        header: list[str] = []  # of what is no table, which is reported when it is read as a whole
        with out.open(encoding="utf-8", errors="surrogateescape", newline="") as file, suppress(csv.Error):
            header = next(csv.reader(file), header)
        return [column.removeprefix(SHARE) for column in header if column.startswith(SHARE)]
    if (x := _read_first_batch(files, options.batch_size)) is None:
        return []
    settings = {name: value for name, value in (options.settings or {}).items() if name in ("output", "amp")}
    with annotate_network_errors(x):
        logits = Source(net, **settings).predict(x.to(find_weight(net)))
    if logits.ndim != 4:
        return []
    check_num_classes(logits.shape[1])
    names = options.classes or ()
    return list(names) if len(names) == logits.shape[1] else [str(number) for number in range(logits.shape[1])]


def _is_readable(root: Path, name: str) -> bool:
    try:
        decode_file(root / name, None)
    except DataError:
        return False
    return True
