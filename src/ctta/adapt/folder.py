"""Adapt a network to a folder of images and write a prediction for each; resumable after any interruption."""

import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from ctta.adapt.images import FolderBatches, FolderImages
from ctta.adapt.options import FolderOptions
from ctta.adapt.predictions import ERROR, PredictionFile, answer_columns
from ctta.adapt.resume import check_image_size, lock_state, open_model, open_predictions
from ctta.adapt.run import InferenceRun
from ctta.adapt.summary import InferenceSummary, summarize
from ctta.core.options import takes_options
from ctta.core.registry import resolve_method
from ctta.data.datasets.image_files import Order, check_order, decode_file, find_images, is_class_tree, sort_images
from ctta.data.streams import Segment, Stream
from ctta.distributed import data_parallel, init
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError, DataError
from ctta.guard import Monitored
from ctta.io.images import Resize
from ctta.methods import Source

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
        net: Source network; takes images in [0, 1] and returns logits of shape (N, classes).
        images: Folder of images, searched recursively.
        out: CSV file to write, with the columns image, batch, class, confidence and error.
        options: The fields of :class:`FolderOptions` as keywords.

    Returns:
        What this call did.

    Raises:
        ConfigError: If an argument is not valid, or contradicts the saved state or an existing ``out``.
        OSError: If a file cannot be written, for instance because the disk is full. The table then ends with a whole
            batch, and the next call resumes from the last saved state.
        DataError: If there are no images or, with ``strict``, one cannot be read.
    """
    method, state, size, batch_size = options.method, options.state, options.size, options.batch_size
    classes, compare, on_progress = options.classes, options.compare, options.on_progress
    if method is not None:
        resolve_method(method)  # raises before anything is read
    check_order(options.order)
    if Path(out).is_dir():
        raise ConfigError(f"{out} is a folder; expected a file to write the table to, such as predictions.csv")
    root, state_path = Path(images), None if state is None else Path(state)
    resize = Resize(size) if size else None
    file = PredictionFile(
        Path(out),
        [*answer_columns(with_names=bool(classes), compare=compare), ERROR],
        escape_formulas=options.escape_formulas,
    )
    init()
    # Rank zero lists the files: while images are being added, each rank would find different ones.
    names, order = run_on_rank_zero(lambda: _list_images(root, options.order))
    files = FolderImages(root.name, tuple(root / name for name in names), None, resize, strict=options.strict)
    with ExitStack() as stack:
        run_on_rank_zero(lambda: stack.enter_context(lock_state(state_path)))
        model, is_new = open_model(
            net, state_path, method, dict(options.settings or {}), guard=options.guard, estimator=options.estimator
        )
        model = data_parallel(model)
        source = data_parallel(Source(net, output=model.output)) if compare else None
        run = InferenceRun(model, source, file, state_path, classes)

        def open_files() -> tuple[list[str], int, int]:
            if not file.path.exists():
                _check_first_batch(run, files, batch_size)  # before anything is written
            with run.advise_on_full_disk(state_path or file.path):
                check_image_size(state_path, size)
                return open_predictions(file, model, state_path, names, partial(_is_readable, root), is_new=is_new)

        processed, num_dropped, num_unreadable = model.coordinator.run_on_rank_zero(open_files)
        if isinstance(model, Monitored):
            model.audit = None if options.audit is None else os.fspath(options.audit)
            if model.num_steps and state_path is not None:
                model.on_load(state_path)
        done = set(processed)
        remaining = np.array([row for row, name in enumerate(names) if name not in done], np.int64)
        num_vanished, num_skipped_before, started = 0, model.num_skipped, time.perf_counter()
        if len(remaining):
            stream = Stream(
                root.name, [Segment(root.name, files, remaining)], batch_size=batch_size, read_ahead=READ_AHEAD
            )

            def on_batch(num_done: int) -> None:
                if on_progress:
                    on_progress(len(processed) + num_done, len(processed) + len(remaining))

            batches = FolderBatches(stream, files, names, model)
            run.process(batches, on_batch)
            num_vanished = batches.num_vanished
        seconds = time.perf_counter() - started
    return summarize(
        run,
        num_before=len(processed) - num_unreadable,
        num_unreadable=num_unreadable + run.num_failed,
        num_dropped=num_dropped,
        num_vanished=num_vanished,
        num_skipped_before=num_skipped_before,
        seconds=seconds,
        order=order,
    )


def _list_images(root: Path, order: Order | None) -> tuple[list[str], Order]:
    """Return the names of the images of a folder in their order, and which order that is."""
    names = [path.relative_to(root).as_posix() for path in find_images(root)]
    chosen = order or ("shuffle" if is_class_tree(names) else "name")
    return [names[position] for position in sort_images(root, names, chosen)], chosen


def _check_first_batch(run: InferenceRun, files: FolderImages, batch_size: int) -> None:
    """Raise if the network cannot process the first batch, so that a mistake leaves no files behind."""
    rows = np.arange(min(batch_size, len(files)))
    images, _ = files.read(rows)
    present = [row for row in rows.tolist() if row not in files.problems]
    if present:
        run.check_network(images[present])


def _is_readable(root: Path, name: str) -> bool:
    try:
        decode_file(root / name, None)
    except DataError:
        return False
    return True
