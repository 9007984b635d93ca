"""Adapt a network to a folder of images and write a prediction for each; resumable after any interruption."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ctta.datasets.image_files import find_images
from ctta.distributed import data_parallel, init
from ctta.distributed.collectives import run_on_rank_zero
from ctta.guard import Monitored
from ctta.hyperparameters import format_hyperparameters
from ctta.inference.predictions import PredictionFile
from ctta.inference.resume import lock_state, open_model, open_predictions
from ctta.inference.run import FolderImages, InferenceRun
from ctta.io.images import Resize
from ctta.methods import Source
from ctta.registry import name_of, resolve_method
from ctta.streams import Segment, Stream

READ_AHEAD = 2  # batches


@dataclass(frozen=True)
class InferenceSummary:
    """Summary of one call of :func:`adapt_folder`.

    Attributes:
        num_images: Images processed by this call.
        num_before: Images processed by earlier calls.
        num_dropped: Images that an earlier call had processed without saving the state, processed again by this one.
        num_changed: Predictions that differ from those of the source network; None if not compared.
        num_vanished: Images that were deleted before they could be read; if they come back, the next call processes
            them.
        num_skipped: Updates skipped because they were not finite.
        confidence: Mean confidence of the predictions; None if there was no image.
        seconds: Duration of the processing.
        method: Name of the method: a key of ``ctta.METHODS``, or the name of another class.
        settings: Hyperparameters of the method.
        events: Number of guard events of each kind, among the last hundred; None without a guard.
    """

    num_images: int
    num_before: int
    num_dropped: int
    num_changed: int | None
    num_vanished: int
    num_skipped: int
    confidence: float | None
    seconds: float
    method: str
    settings: str
    events: dict[str, int] | None


def adapt_folder(
    net: nn.Module,
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    state: str | os.PathLike[str] | None = None,
    size: tuple[int, int] | None = None,
    batch_size: int = 32,
    classes: Sequence[str] | None = None,
    compare: bool = False,
    guard: bool = False,
    audit: str | os.PathLike[str] | None = None,
    escape_formulas: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> InferenceSummary:
    """Predict every image of a folder while adapting, in the order of their paths, and write a CSV file.

    With ``state`` the adapted model is saved regularly. Called again after an interruption, the function resumes with
    the remaining images, and the file ends up identical to that of an uninterrupted call; called again later, it
    processes the images that were added since. Another folder with another ``out`` continues the same stream. Under
    ``torchrun`` the ranks share each batch, and the first one writes the files.

    Args:
        net: Source network; takes images in [0, 1] and returns logits of shape (N, classes).
        images: Folder of images, searched recursively.
        out: CSV file to write, with the columns image, batch, class and confidence.
        method: Name as :func:`ctta.adapt` takes it; by default that of the saved state, and ``"cotta"`` without one.
            The state of a method that is not part of the library needs its name again.
        settings: Hyperparameters of the method; those of a saved state need not be repeated and cannot be changed.
        state: File to save the adapted model to, also readable by :func:`ctta.load`.
        size: (height, width) to resize the images to; without it, the images of a batch must have the same size.
        batch_size: Images per step.
        classes: Class names, for an additional column.
        compare: Whether to also predict with the unadapted source network, for additional columns.
        guard: Whether to wrap the method in :class:`ctta.Guarded`; a state saved with a guard keeps it.
        audit: File for the events of the guard, one line of JSON each.
        escape_formulas: Whether to write an apostrophe before a name that a spreadsheet would run as a formula, such as
            ``=1+1.png``.
        on_progress: Called after each batch with the number of processed images and the total.

    Returns:
        What this call did.

    Raises:
        ConfigError: If an argument is not valid, or contradicts the saved state or an existing ``out``.
        OSError: If a file cannot be written, for instance because the disk is full. The table then ends with a whole
            batch, and the next call resumes from the last saved state.
        DataError: If there are no images, or one cannot be read.
    """
    if method is not None:
        resolve_method(method)  # raises before anything is read
    root, state_path = Path(images), None if state is None else Path(state)
    resize = Resize(size) if size else None
    file = PredictionFile(
        Path(out), _columns(with_names=bool(classes), compare=compare), escape_formulas=escape_formulas
    )
    init()
    # Rank zero lists the files: while images are being added, each rank would find different ones.
    names = run_on_rank_zero(lambda: [path.relative_to(root).as_posix() for path in find_images(root)])
    with ExitStack() as stack:
        run_on_rank_zero(lambda: stack.enter_context(lock_state(state_path)))
        model, is_new = open_model(net, state_path, method, dict(settings or {}), guard=guard)
        model = data_parallel(model)
        processed, num_dropped = model.coordinator.run_on_rank_zero(
            lambda: open_predictions(file, model, state_path, names, is_new=is_new)
        )
        if isinstance(model, Monitored):
            model.audit = None if audit is None else os.fspath(audit)
            if model.num_steps and state_path is not None:
                model.on_load(state_path)
        done = set(processed)
        remaining = np.array([row for row, name in enumerate(names) if name not in done], np.int64)
        source = data_parallel(Source(net, output=model.output)) if compare else None
        run = InferenceRun(model, source, file, state_path, classes)
        num_skipped_before, started = model.num_skipped, time.perf_counter()
        paths = tuple(root / name for name in names)
        files = FolderImages(root.name, paths, None, resize)
        if len(remaining):
            stream = Stream(
                root.name, [Segment(root.name, files, remaining)], batch_size=batch_size, read_ahead=READ_AHEAD
            )

            def on_batch(num_done: int) -> None:
                if on_progress:
                    on_progress(len(processed) + num_done, len(processed) + len(remaining))

            run.process(stream, files, names, on_batch)
        seconds = time.perf_counter() - started
    num_images = len(remaining) - run.num_vanished
    return InferenceSummary(
        num_images=num_images,
        num_before=len(processed),
        num_dropped=num_dropped,
        num_changed=run.num_changed if compare else None,
        num_vanished=run.num_vanished,
        num_skipped=model.num_skipped - num_skipped_before,
        confidence=run.confidence_sum / num_images if num_images else None,
        seconds=seconds,
        method=name_of(type(model.unwrapped)),
        settings=format_hyperparameters(model.unwrapped.hyperparameters),
        events=dict(Counter(event.kind for event in model.events)) if isinstance(model, Monitored) else None,
    )


def _columns(*, with_names: bool, compare: bool) -> list[str]:
    columns = ["class", *(["name"] if with_names else []), "confidence"]
    return [*columns, *(f"source_{column}" for column in columns)] if compare else columns
