"""Start or resume: the locks on the table and the state, the model, and the rows that are already written."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from glob import escape
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ctta.adapt.options import AdaptOptions
from ctta.adapt.predictions import PredictionFile
from ctta.adapt.run import InferenceRun
from ctta.checkpoint.encoding import encode
from ctta.checkpoint.files import load, save
from ctta.core.model import AdaptiveModel
from ctta.core.registry import DEFAULT_METHOD, resolve_method
from ctta.distributed import data_parallel, world_size
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError
from ctta.guard import Guarded, InputSpec, Monitored
from ctta.io.atomic import parse_local_path
from ctta.io.provenance import check_same_settings, read_settings, record_settings
from ctta.optim import with_lr

_ANY_IMAGE = InputSpec(low=0, high=1, any_size=True)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Keep a second process from resuming from the same state, or appending rows to the same table."""
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise ImportError("a run needs filelock, which is not installed: pip install 'ctta[data]'") from error
    parse_local_path(path).parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{path} is in use by another process: wait for it to end, or use another file") from None
    try:
        for leftover in path.parent.glob(f".{escape(path.name)}.*.tmp"):  # of killed saves, each as large as a state
            leftover.unlink()
        yield
    finally:
        if os.name == "posix" and not path.exists():  # after a mistake, which leaves no files behind
            Path(lock.lock_file).unlink(missing_ok=True)  # before somebody else can have it
        lock.release()


def open_model(net: nn.Module, state: Path | None, options: AdaptOptions) -> tuple[AdaptiveModel, bool]:
    """Load the model from the state file, or build a new one; return it and whether it is new."""
    method, settings, guard = options.method, dict(options.settings or {}), options.guard
    if state is None or not state.exists():
        model = build_model(net, method or DEFAULT_METHOD, settings)
        # Ranks that share a stream cannot be guarded; those who ask for it nevertheless are told so.
        is_guarded = world_size() == 1 if guard is None else guard
        return Guarded(model, input_spec=_ANY_IMAGE) if is_guarded else model, True
    model = load(state, net, method=method)
    if model.frozen:
        raise ConfigError(f"{state} was saved frozen and would not adapt: load it, call unfreeze() and save it again")
    saved = model.unwrapped.hyperparameters
    settings = {**(resolve_method(method).settings if method else {}), **settings}
    if "optimizer" in saved and "lr" in settings:  # files have the learning rate within the optimizer
        settings["optimizer"] = with_lr(settings.get("optimizer", saved["optimizer"]), settings.pop("lr"))
    check_same_settings(
        state,
        {name: encode(saved.get(name)) for name in settings},
        {name: encode(value) for name, value in settings.items()},
        hint="use the same settings, or another state",
    )
    if guard is not None and guard != isinstance(model, Monitored):
        was, option = ("without a guard", "guard") if guard else ("with a guard", "no guard")
        raise ConfigError(f"{state} was saved {was} and resumes so: do not ask for {option}, or use another state")
    return model, False


def build_model(net: nn.Module, method: str, settings: dict[str, Any]) -> AdaptiveModel:
    """Build a new model, with blended statistics unless a preset or the user pins them.

    On images like those of its training a network loses several points with batch statistics alone, at any batch size;
    blended ones keep most of them, and are no worse under corruptions (docs/results/choices.md). How far they are
    blended also depends on how sure the source is of a batch, see :mod:`ctta.adapt.run`.
    """
    named = resolve_method(method)
    default = signature(named.method).parameters.get("batch_stats")
    if default is not None and default.default == "auto" and "batch_stats" not in named.settings:
        settings = {"batch_stats": "blend", **settings}
    return named.build(net, **settings)


def check_image_size(state: Path | None, size: tuple[int, int] | None) -> None:
    """Raise if the images of a saved state were resized to another size, and otherwise record the size beside it.

    The network would see all objects at another scale in the middle of a stream.
    """
    if state is None:
        return
    path, settings = state.with_name(f"{state.name}.json"), {"size": size and list(size)}
    if state.exists() and path.exists():
        check_same_settings(
            state, read_settings(path, hint="delete it"), settings, hint="use the same --size (size=), or another state"
        )
        return
    path.unlink(missing_ok=True)  # of a state that is gone
    record_settings(path, settings)


def check_arguments(out: Path, options: AdaptOptions) -> None:
    """Raise before anything is read if the method does not exist, or the table would be a folder."""
    if options.method is not None:
        resolve_method(options.method)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; expected a file to write the table to, such as predictions.csv")


@contextmanager
def open_run(
    net: nn.Module,
    file: PredictionFile,
    options: AdaptOptions,
    *,
    images: Sequence[str],
    compare: bool,
    read_first_batch: Callable[[], Tensor | None],
    is_readable: Callable[[str], bool] = lambda _name: True,
    allow_pixels: bool = False,
) -> Iterator[InferenceRun]:
    """Start a run, or resume it from the state and the table, which are locked while it is open.

    Args:
        net: The network.
        file: The table.
        options: What the user chose.
        images: Names of all images, to notice that the table belongs to others.
        compare: Whether the source predicts as well.
        read_first_batch: Returns what the network is tried on before anything is written, if there is anything.
        is_readable: Tells whether an image can be read; those that could not be before are then processed.
        allow_pixels: Whether the network may answer per pixel.
    """
    state = None if options.state is None else Path(options.state)
    with ExitStack() as stack:
        for path in filter(None, (file.path, state)):
            run_on_rank_zero(partial(stack.enter_context, lock_file(path)))
        model, is_new = open_model(net, state, options)
        model = data_parallel(model)
        run = InferenceRun(model, file, state, options.classes, compare=compare, allow_pixels=allow_pixels)

        def open_files() -> tuple[list[str], int, int]:
            if not file.path.exists() and (x := read_first_batch()) is not None:
                run.check_network(x)  # so that a mistake leaves no files behind
            with run.advise_on_full_disk(state or file.path):
                check_image_size(state, options.size)
                if not file.path.exists() or (is_new and file.is_without_rows()):
                    if state is not None:
                        state.parent.mkdir(parents=True, exist_ok=True)
                        save(model, state)  # first, so that a table without a state is recognized as foreign
                    file.create()
                    return [], 0, 0
                if is_new:
                    missing = f"there is no state at {state}" if state else "no state was given"
                    raise ConfigError(
                        f"{file.path} exists but {missing} to resume from: choose another file, or delete it"
                    )
                processed, num_dropped = file.truncate(model.num_steps, images)  # to the rows of the saved state
                readable, num_unreadable = file.drop_errors(is_readable)
                return sorted(processed - readable), num_dropped, num_unreadable

        run.processed, run.num_dropped, run.num_unreadable = model.coordinator.run_on_rank_zero(open_files)
        if isinstance(model, Monitored):
            model.audit = None if options.audit is None else os.fspath(options.audit)
            if model.num_steps and state is not None:
                model.on_load(state)
        yield run
