"""The options of ``ctta serve``, :class:`ctta.serve.Service` and a service on Ray."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from typing_extensions import Doc

from ctta.core.options import CLASSES, Option
from ctta.core.validation import check_choice, check_integer
from ctta.errors import ConfigError

SERVER, STREAMS, LIMITS = "Server", "Streams", "Limits"  # sections of ``ctta serve --help``


@dataclass(frozen=True)
class Limits:
    """Limits beyond which requests are rejected; the defaults suit one machine.

    The others have options of the command.

    Attributes:
        max_live_bytes: Memory of all live streams, without the source network that they share.
        max_total_queue: Requests that wait for any stream.
        max_body_bytes: Size of a request body.
        max_side: Height and width of an image in pixels, for a service without an image size.
        max_image_pixels: Pixels of an image file before it is resized.
        max_request_bytes: Memory of all requests that are being handled: their bodies, and what is decoded from them.
        max_connections: Open connections.
    """

    max_live_streams: Annotated[
        int,
        Option("Keep at most N streams in memory; others wait on disk.", "N", "--live-streams", min=1, panel=LIMITS),
    ] = 64
    max_streams: Annotated[
        int, Option("Accept at most N streams in memory and on disk.", "N", "--streams", min=1, panel=LIMITS)
    ] = 10_000
    max_live_bytes: int = 3 * 2**30
    max_queue: Annotated[
        int, Option("Let at most N requests wait for one stream.", "N", "--queue", min=1, panel=LIMITS)
    ] = 16
    max_total_queue: int = 256
    max_body_bytes: int = 16 * 2**20
    max_batch: Annotated[int, Option("Accept at most N images per request.", "N", "--batch", min=1, panel=LIMITS)] = 256
    max_side: int = 2048
    max_image_pixels: int = 32_000_000
    max_request_bytes: int = 2**30
    request_timeout: Annotated[
        float, Option("Give up on a request after this time.", "SECONDS", "--timeout", min=0.01, panel=LIMITS)
    ] = 60.0
    max_connections: int = 512

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the limit {each.name} must be positive, got {value!r}")
        if self.max_live_streams > self.max_streams:
            raise ConfigError(
                f"max_live_streams must not exceed max_streams, got {self.max_live_streams} and {self.max_streams}"
            )
        if 2 * self.max_body_bytes > self.max_request_bytes:
            raise ConfigError(
                f"max_request_bytes must be at least twice max_body_bytes, {2 * self.max_body_bytes}, for a body and "
                f"what is decoded from it; got {self.max_request_bytes}"
            )

    @property
    def max_total_body_bytes(self) -> int:
        """Size of all request bodies that are being handled; a single one of the allowed size always fits."""
        return max(self.max_request_bytes // 4, self.max_body_bytes)

    @property
    def max_decoded_bytes(self) -> int:
        """Memory for what is decoded from bodies."""
        return self.max_request_bytes - self.max_total_body_bytes


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
        replace(CLASSES, name="--classes"),
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

    def __post_init__(self) -> None:
        check_integer("num_answers", self.num_answers, 0, 10**6)
        if self.on_harm is not None:
            check_choice("on_harm", self.on_harm, ("reset", "freeze"))
        if (self.window_size or 0) < 0 or (1 if self.update_every is None else self.update_every) < 1:
            raise ConfigError(
                "window_size must be at least 0 and update_every at least 1, "
                f"got {self.window_size} and {self.update_every}"
            )
        if self.snapshot_interval <= 0:
            raise ConfigError(f"snapshot_interval must be positive, got {self.snapshot_interval}")
        if self.unready_after is not None and self.unready_after < 2 * self.snapshot_interval:
            raise ConfigError(
                f"unready_after must be at least two snapshot intervals, {2 * self.snapshot_interval:g} s, since "
                f"saving a change may take so long; got {self.unready_after:g}"
            )


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
