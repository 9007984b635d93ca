"""The options of ``ctta adapt``, :func:`ctta.adapt.adapt_folder` and :func:`ctta.adapt.adapt_video`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import Doc

from ctta.core.options import Classes, Option
from ctta.data.datasets.image_files import Order

VIDEO = "Video"  # a section of ``ctta adapt --help``


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """What folders and videos have in common."""

    method: Annotated[
        str | None,
        Doc(
            'Name as :func:`ctta.adapt` takes it; by default that of the saved state, and ``"vane"`` without one. The '
            "state of a method that is not part of the library needs its name again."
        ),
    ] = None
    settings: Annotated[
        Mapping[str, Any] | None,
        Doc("Hyperparameters of the method; those of a saved state need not be repeated and cannot be changed."),
    ] = None
    state: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Save the adapted model to this file, and resume from it if it exists; ctta.load reads it too. "
            "Default: not saved.",
            "FILE.safetensors",
        ),
    ] = None
    size: Annotated[
        tuple[int, int] | None,
        Doc(
            "(height, width) to resize the images to; without it, the images of a batch must have the same size. It "
            "cannot be changed once there is a state."
        ),
    ] = None
    batch_size: Annotated[
        int, Doc("Images per step; the fewer, the more BatchNorm relies on the source's statistics.")
    ] = 32
    classes: Classes = None
    compare: Annotated[bool, Option("Also write the predictions of the network without adaptation.")] = False
    guard: Annotated[
        bool | None,
        Option(
            "Detect and undo a collapse of the method, and let the network without adaptation answer batches that are "
            "sorted by class; log events to FILE.audit.jsonl next to --out. Default: --guard, unless several processes "
            "share the stream; a saved state stays as it was."
        ),
        Doc(
            "Whether to wrap the method in :class:`ctta.guard.Guarded`. By default a new state is guarded, unless "
            "several processes share the stream, and a saved state stays as it was."
        ),
    ] = None
    audit: Annotated[str | os.PathLike[str] | None, Doc("File for the events of the guard, one line of JSON each.")] = (
        None
    )
    escape_formulas: Annotated[
        bool, Option("Write an apostrophe before names that a spreadsheet would run as a formula, such as =1+1.png.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class FolderOptions(AdaptOptions):
    """The options for a folder of images."""

    order: Annotated[
        Order | None,
        Option(
            "Take the images in this order: shuffled (by a hash of their names, so that images can be added later), by "
            "path (name), or by time of modification. Default: shuffle for a folder per class, else name."
        ),
    ] = None
    strict: Annotated[
        bool,
        Option("Stop at an image that cannot be read, instead of skipping it and writing the reason to the table."),
    ] = False
    on_progress: Annotated[
        Callable[[int, int], None] | None,
        Doc("Called after each batch with the number of processed images and the total."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class VideoOptions(AdaptOptions):
    """The options for a video."""

    every: Annotated[int, Doc("Take every n-th frame.")] = 1
    interval: Annotated[float | None, Doc("Seconds between frames to take, instead of ``every``.")] = None
    seconds: Annotated[
        float | None,
        Option("Read this much of the video. Default: all of it, or until Ctrl-C.", "SECONDS", panel=VIDEO),
    ] = None
    annotate: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Write a video that shows the answers of the network without and with adaptation on the frames; implies "
            "--compare. Default: none.",
            "FILE.mp4",
            panel=VIDEO,
        ),
    ] = None
    on_progress: Annotated[
        Callable[[int, int | None], None] | None,
        Doc("Called after each batch with the number of processed frames and the total, None if unknown."),
    ] = None
    on_wait: Annotated[
        Callable[[], None] | None,
        Doc("Called several times a second while a camera sends no frame; may raise to end the call."),
    ] = None
    on_change: Annotated[
        Callable[[str], None] | None, Doc("Called with a sentence when a camera drops and when it returns.")
    ] = None
