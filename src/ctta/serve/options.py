"""The options of ``ctta serve``, :class:`ctta.serve.Service` and a service on Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from typing_extensions import Doc

from ctta.core.options import Option, read_class_names
from ctta.serve.limits import Limits

SERVER, STREAMS = "Server", "Streams"  # sections of ``ctta serve --help``


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a service treats its streams."""

    name: Annotated[
        str, Option("Call the model by this name in the Open Inference Protocol.", "NAME", panel=SERVER)
    ] = "ctta"
    image_size: Annotated[
        tuple[int, int] | None,
        Doc(
            "(height, width) that image files are resized to and tensors must have. None for any: image files are then "
            "resized to the size of their stream's first image."
        ),
    ] = None
    class_names: Annotated[
        Sequence[str] | None,
        Option(
            "Read the class names from this text file, one per line, in the order of the network's outputs.",
            "FILE",
            "--classes",
            parse=read_class_names,
        ),
        Doc("Names of the classes."),
    ] = None
    num_workers: Annotated[
        int | None,
        Option(
            "Process N streams in parallel. Default: one for every two cores.", "N", "--workers", min=1, panel=SERVER
        ),
    ] = None
    snapshot_interval: Annotated[
        float,
        Option(
            "Save a stream that changes at most this often.", "SECONDS", "--snapshot-every", min=0.01, panel=STREAMS
        ),
        Doc("Seconds between two snapshots of a stream that changes."),
    ] = 30.0
    unready_after: Annotated[
        float | None,
        Option(
            "Report not ready if a change stays unsaved for this long. Default: 4 x --snapshot-every.",
            "SECONDS",
            min=0.01,
            panel=STREAMS,
        ),
    ] = None
    window_size: Annotated[
        int | None,
        Option(
            "Normalize a single image together with the stream's last N. Default: 16, or 0 without BatchNorm.",
            "N",
            "--window",
            min=0,
            panel=STREAMS,
        ),
    ] = None
    update_every: Annotated[
        int | None, Option("Update a stream after every N images. Default: 4.", "N", min=1, panel=STREAMS)
    ] = None
    time_budget: Annotated[
        float | None,
        Option(
            "Spend at most this fraction of time on the updates of a stream, such as 0.2. Default: no limit.",
            "FRACTION",
            "--budget",
            panel=STREAMS,
        ),
    ] = None
    num_answers: Annotated[
        int,
        Option(
            "Remember the last N answers of each stream and those of the source, so that labels can tell whether "
            "adaptation helps; costs a pass of the source per request.",
            "N",
            "--feedback",
            min=0,
            max=1_000_000,
            panel=STREAMS,
        ),
    ] = 0
    keep_images: Annotated[
        bool,
        Option(
            "Show the last image of each stream on the page, to whoever has the clients' token.",
            name="--show-images",
            panel=STREAMS,
        ),
    ] = False
    on_harm: Annotated[
        Literal["reset", "freeze"] | None,
        Option(
            "Reset or freeze a stream whose labels show that adaptation harms. Default: only report it.", panel=STREAMS
        ),
    ] = None
    limits: Annotated[Limits, Doc("Limits beyond which requests are rejected.")] = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How a service is spread over a Ray cluster."""

    num_shards: Annotated[
        int,
        Option(
            "Spread the streams over N processes of --ray at most, which start when they are needed; fixed for a "
            "--state.",
            "N",
            "--shards",
            min=1,
            panel=SERVER,
        ),
    ] = 256
    num_cpus: Annotated[
        float, Option("Reserve N CPUs for each process of --ray.", "N", "--shard-cpus", min=0.0, panel=SERVER)
    ] = 0.0
    num_gpus: Annotated[
        float | None,
        Option(
            "Reserve N GPUs for each process of --ray. Default: 0.02 with --device cuda, else 0.",
            "N",
            "--shard-gpus",
            min=0.0,
            panel=SERVER,
        ),
    ] = None
