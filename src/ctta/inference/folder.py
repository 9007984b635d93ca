"""Adapt to a folder of pictures and write down what each is taken for; stopped at any moment, it can go on."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ctta.base import AdaptiveModel
from ctta.checkpoint.encoding import encode
from ctta.checkpoint.files import load, save
from ctta.datasets.image_files import ImageFiles, Resize, find_images
from ctta.distributed import data_parallel, init
from ctta.distributed.collectives import run_on_rank_zero
from ctta.guard import Guarded
from ctta.hyperparameters import format_hyperparameters
from ctta.inference.predictions import PredictionFile
from ctta.inference.run import Run
from ctta.methods import METHODS, Source, adapt
from ctta.streams import Segment, Stream

READ_AHEAD = 2  # batches


@dataclass(frozen=True)
class Adapted:
    """What one call did."""

    num_images: int  # in this call
    num_before: int  # already done by earlier calls
    num_dropped: int  # images that a killed call had done without saving the state, done again
    num_changed: int | None  # predictions that differ from the source's; None if not compared
    num_skipped: int  # updates left out because they were not finite
    confidence: float | None  # mean; None where there was no image
    seconds: float
    method: str
    settings: str
    events: dict[str, int] | None  # how often the guard did what, at most the last hundred; None without a guard


def adapt_to_folder(
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
    on_images: Callable[[int, int], None] | None = None,
) -> Adapted:
    """Predict every picture of a folder while adapting to them, in the order of their paths, into a CSV file.

    With ``state`` the stream is saved there from time to time. Called again after it was killed, it goes on with the
    pictures not yet done, and the file ends up identical to an uninterrupted one's; called again later, it goes on
    with the pictures that have come since. Another folder with another ``out`` goes on with the same stream. Under
    ``torchrun`` the ranks divide each batch, and the first writes the files.

    Args:
        net: the source network; takes images in [0, 1] and gives one class per image.
        images: the folder, with pictures in it or below.
        out: the CSV file: image, number of the step, class, confidence.
        method: a key of ``ctta.METHODS``; by default that of the state, and CoTTA for a new one.
        settings: of the method; those of a state need not be given again, and cannot be changed.
        state: where to save the stream, for this function or :func:`ctta.load`.
        size: (height, width) to resize to; without, pictures of one batch must be of one size.
        batch_size: pictures per step.
        classes: names of the classes, for a further column.
        compare: also ask the network as it was trained, for further columns.
        guard: put the method into a :class:`ctta.Guarded`; a state that was begun so goes on so.
        audit: where the guard writes its events, a line of JSON each.
        on_images: called with how many pictures are done and how many there are.
    """
    root, place = Path(images), None if state is None else Path(state)
    named = ["name"] if classes else []
    of_source = [f"source_{column}" for column in ("class", *named, "confidence")] if compare else []
    file = PredictionFile(Path(out), ["class", *named, "confidence", *of_source])
    init()
    # The first rank looks: while pictures still come, each would find others.
    names = run_on_rank_zero(lambda: [path.relative_to(root).as_posix() for path in find_images(root)])
    with ExitStack() as held:
        run_on_rank_zero(lambda: held.enter_context(_only_process_with(place)))
        model, is_new = _model(net, place, method, dict(settings or {}), guard=guard)
        model = data_parallel(model)
        already, num_dropped = model.coordinator.run_on_rank_zero(lambda: _begin_or_go_on(model, is_new, place, file))
        done = set(already)
        if isinstance(model, Guarded):
            model.audit = audit
            if model.num_steps:
                model.note("load", f"from {place}")
        left = np.array([row for row, name in enumerate(names) if name not in done], np.int64)
        run = Run(model, data_parallel(Source(net, output=model.output)) if compare else None, file, place, classes)
        skipped_before, started = model.num_skipped, time.perf_counter()
        if len(left):
            paths = tuple(root / name for name in names)
            pictures = ImageFiles(root.name, paths, None, Resize(size) if size else None)
            segments = [Segment(root.name, pictures, left)]
            stream = Stream(root.name, segments, batch_size=batch_size, read_ahead=READ_AHEAD)
            tell = on_images or (lambda done, total: None)
            run.go_through(stream, names, lambda count: tell(len(done) + count, len(done) + len(left)))
    return Adapted(
        num_images=len(left),
        num_before=len(done),
        num_dropped=num_dropped,
        num_changed=run.num_changed if compare else None,
        num_skipped=model.num_skipped - skipped_before,
        confidence=run.confidence_sum / len(left) if len(left) else None,
        seconds=time.perf_counter() - started,
        method={cls: name for name, cls in METHODS.items()}[type(_method_of(model))],
        settings=format_hyperparameters(_method_of(model).hyperparameters),
        events=dict(Counter(event.kind for event in model.events)) if isinstance(model, Guarded) else None,
    )


def _model(
    net: nn.Module, state: Path | None, method: str | None, settings: dict[str, Any], *, guard: bool
) -> tuple[AdaptiveModel, bool]:
    """The model, and whether it is a new one."""
    if state is None or not state.exists():
        model = adapt(net, method or "cotta", **settings)
        return Guarded(model) if guard else model, True
    model = load(state, net, method=METHODS[method] if method else None)
    _check_same(model, settings, state)
    if guard and not isinstance(model, Guarded):
        raise ValueError(f"{state} was begun without a guard, and now one is asked for: begin another state")
    return model, False


def _begin_or_go_on(
    model: AdaptiveModel, is_new: bool, state: Path | None, file: PredictionFile
) -> tuple[list[str], int]:
    """The images that are done, and how many were done but will have to be done again."""
    if file.path.exists():
        if is_new:
            hint = f"no state at {state} to go on from" if state else "no state given to go on from"
            raise ValueError(f"{file.path} exists, and there is {hint}: name another file, or remove that one")
        done, num_dropped = file.cut_back_to(model.num_steps)
        return sorted(done), num_dropped
    if state is not None:
        state.parent.mkdir(parents=True, exist_ok=True)
        save(model, state)  # before the first row: from now on a file without a state is somebody else's
    file.begin()
    return [], 0


def _check_same(model: AdaptiveModel, settings: dict[str, Any], state: Path) -> None:
    if model.frozen:
        raise ValueError(f"{state} was saved frozen, so that it would not adapt: load it, unfreeze() and save it again")
    there = _method_of(model).hyperparameters
    for name, value in settings.items():
        if encode(there[name]) != encode(value):
            now, before = (format_hyperparameters({name: each}) for each in (value, there[name]))
            raise ValueError(f"{state} was begun with {before}, and now {now} is asked for: begin another state")


def _method_of(model: AdaptiveModel) -> AdaptiveModel:
    return model.inner if isinstance(model, Guarded) else model


@contextmanager
def _only_process_with(state: Path | None) -> Iterator[None]:
    """Two processes that go on from one state would write into each other's rows."""
    if state is None:
        yield
        return
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise ImportError("a state to go on from needs the extra 'data': pip install 'ctta[data]'") from error
    state.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state.with_name(f"{state.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is adapting with {state}: wait for it, or give another state") from None
    try:
        for leftover in state.parent.glob(f".{escape(state.name)}.*.tmp"):  # of saves that were killed; each is a state
            leftover.unlink()
        yield
    finally:
        lock.release()
