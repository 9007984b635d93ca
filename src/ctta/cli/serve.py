"""``ctta serve``: serve an adaptive model over HTTP."""

import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from ctta.cli.console import print_text
from ctta.cli.options import (
    METHOD_HELP,
    ClassesOption,
    ConfigOption,
    DeviceOption,
    MeanOption,
    OptionalModelOption,
    PolicyOption,
    SeedOption,
    SettingsOption,
    SizeOption,
    StdOption,
    join_settings,
    parse_every,
)
from ctta.cli.service import ServiceRecipe, serve_on_ray
from ctta.data.datasets.video import FrameSampling
from ctta.errors import ConfigError

# Panels of ``ctta serve --help``.
SERVER, STREAMS, LIMITS = "Server", "Streams", "Limits"


class HarmRemedy(StrEnum):
    """What to do with a stream that adaptation harms."""

    RESET = "reset"
    FREEZE = "freeze"


def _get_remedy(chosen: HarmRemedy | None) -> Literal["reset", "freeze"] | None:
    return None if chosen is None else chosen.value


def serve(
    model: OptionalModelOption = None,
    config: ConfigOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{METHOD_HELP} Default: that of --config or of the saved streams, else vane.", metavar="NAME"
        ),
    ] = None,
    settings: SettingsOption = None,
    policies: PolicyOption = None,
    size: SizeOption = None,
    classes: ClassesOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    guard: Annotated[bool, typer.Option(help="Monitor each stream, and roll it back when it collapses.")] = True,
    device: DeviceOption = "cpu",
    seed: SeedOption = None,
    host: Annotated[
        str,
        typer.Option(
            help="Listen on this address; any but loopback requires a token.", metavar="ADDRESS", rich_help_panel=SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Listen on this port; 0 picks a free one.", metavar="N", rich_help_panel=SERVER
        ),
    ] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Read the clients' token from this file. Default: $CTTA_SERVE_TOKEN.",
            metavar="FILE",
            rich_help_panel=SERVER,
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="Read the operators' token from this file. Default: $CTTA_SERVE_ADMIN_TOKEN.",
            metavar="FILE",
            rich_help_panel=SERVER,
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Call the model by this name in the Open Inference Protocol.", metavar="NAME", rich_help_panel=SERVER
        ),
    ] = "ctta",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Process N streams in parallel. Default: one for every two cores.",
            metavar="N",
            rich_help_panel=SERVER,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Use N torch threads per worker.", metavar="N", rich_help_panel=SERVER)
    ] = 1,
    camera: Annotated[
        list[str] | None,
        typer.Option(
            help="Read this camera (rtsp://..., /dev/video0) or video file and feed its frames to the stream NAME; "
            "repeatable. See /cameras. Default: none.",
            metavar="NAME=ADDRESS",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    source: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    every: Annotated[
        str,
        typer.Option(
            help="Take every N-th frame of a --camera, or one per interval, such as 0.5s.",
            metavar="N|Ns",
            rich_help_panel=STREAMS,
        ),
    ] = "1",
    ray: Annotated[
        str | None,
        typer.Option(
            help="Serve on the Ray cluster at this address; auto finds one, local starts one. Needs --state. "
            "Default: one process, no cluster.",
            metavar="ADDRESS",
            rich_help_panel=SERVER,
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Spread the streams over N processes of --ray at most, which start when they are needed; fixed for a "
            "--state. Default: 256.",
            metavar="N",
            rich_help_panel=SERVER,
        ),
    ] = None,
    shard_cpus: Annotated[
        float,
        typer.Option(min=0.0, help="Reserve N CPUs for each process of --ray.", metavar="N", rich_help_panel=SERVER),
    ] = 0.0,
    shard_gpus: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Reserve N GPUs for each process of --ray. Default: 0.02 with --device cuda, else 0.",
            metavar="N",
            rich_help_panel=SERVER,
        ),
    ] = None,
    replicas: Annotated[int | None, typer.Option(hidden=True)] = None,
    replica_cpus: Annotated[float | None, typer.Option(hidden=True)] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Save the streams in this folder, and resume those found there; with --ray, a folder that all "
            "machines share, or a URL such as s3://bucket/streams. Default: not saved.",
            metavar="DIR",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    snapshot_every: Annotated[
        float,
        typer.Option(
            min=0.01, help="Save a stream that changes at most this often.", metavar="SECONDS", rich_help_panel=STREAMS
        ),
    ] = 30.0,
    unready_after: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Report not ready if a change stays unsaved for this long. Default: 4 x --snapshot-every.",
            metavar="SECONDS",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Normalize a single image together with the stream's last N. Default: 16, or 0 without BatchNorm.",
            metavar="N",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    update_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Update a stream after every N images. Default: 4.", metavar="N", rich_help_panel=STREAMS
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Spend at most this fraction of time on the updates of a stream, such as 0.2. Default: no limit.",
            metavar="FRACTION",
            rich_help_panel=STREAMS,
        ),
    ] = None,
    feedback: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            help="Remember the last N answers of each stream and those of the source, so that labels can tell whether "
            "adaptation helps; costs a pass of the source per request.",
            metavar="N",
            rich_help_panel=STREAMS,
        ),
    ] = 0,
    show_images: Annotated[
        bool,
        typer.Option(
            "--show-images",
            help="Show the last image of each stream on the page, to whoever has the clients' token. "
            "Default: images are not shown.",
            rich_help_panel=STREAMS,
        ),
    ] = False,
    pictures: Annotated[bool, typer.Option("--pictures", hidden=True)] = False,
    on_harm: Annotated[
        HarmRemedy | None,
        typer.Option(
            help="Reset or freeze a stream whose labels show that adaptation harms. Default: only report it.",
            metavar="|".join(HarmRemedy),
            rich_help_panel=STREAMS,
        ),
    ] = None,
    live_streams: Annotated[
        int,
        typer.Option(
            min=1, help="Keep at most N streams in memory; others wait on disk.", metavar="N", rich_help_panel=LIMITS
        ),
    ] = 64,
    streams: Annotated[
        int,
        typer.Option(
            min=1, help="Accept at most N streams in memory and on disk.", metavar="N", rich_help_panel=LIMITS
        ),
    ] = 10_000,
    memory: Annotated[
        int,
        typer.Option(
            min=1, help="Use at most this much memory for streams and requests.", metavar="MB", rich_help_panel=LIMITS
        ),
    ] = 4096,
    request_memory: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use this part of --memory for bodies and what is decoded from them; more wait. Default: a quarter.",
            metavar="MB",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(min=1, help="Let at most N requests wait for one stream.", metavar="N", rich_help_panel=LIMITS),
    ] = 16,
    body: Annotated[
        int, typer.Option(min=1, help="Reject larger requests.", metavar="MB", rich_help_panel=LIMITS)
    ] = 16,
    batch: Annotated[
        int, typer.Option(min=1, help="Accept at most N images per request.", metavar="N", rich_help_panel=LIMITS)
    ] = 256,
    timeout: Annotated[
        float,
        typer.Option(min=0.01, help="Give up on a request after this time.", metavar="SECONDS", rich_help_panel=LIMITS),
    ] = 60.0,
) -> None:
    """Serve an adaptive model over HTTP: images in, labels out, for many cameras at once.

    Each stream (a camera, a production line, a ward) adapts on its own, and is
    created by its first image. There is a status page at /, an image endpoint
    for curl, and the Open Inference Protocol of Triton and KServe. After a
    stop or kill, run the same command again to resume every saved stream.
    """
    try:
        import ctta.serve as serving
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctta"):
            raise
        raise ImportError(f"serving needs {error.name}, which is not installed: pip install 'ctta[serve]'") from error
    tokens = serving.read_tokens(token_file, admin_token_file)
    serving.check_host(host, tokens)
    if request_memory is None:
        request_memory = max(memory // 4, 2 * body)
    if request_memory >= memory:
        raise ConfigError(
            f"--memory {memory} leaves nothing for the streams, as requests may use {request_memory} MB: give a larger "
            "--memory, or a smaller --request-memory or --body"
        )
    limits = serving.Limits(
        max_live_streams=live_streams,
        max_streams=streams,
        max_live_bytes=(memory - request_memory) * 2**20,
        max_request_bytes=request_memory * 2**20,
        max_queue=queue,
        max_body_bytes=body * 2**20,
        max_batch=batch,
        request_timeout=timeout,
    )
    sampling = FrameSampling(**parse_every(every))
    for old, new, is_given in (("--source", "--camera", source), ("--pictures", "--show-images", pictures)):
        if is_given:
            warnings.warn(f"{old} is deprecated: give {new}", DeprecationWarning, stacklevel=2)
    cameras = [serving.StreamCamera.parse(text, sampling) for text in [*(camera or ()), *(source or ())]]
    recipe = ServiceRecipe(
        model=model,
        config=config,
        method=method,
        texts=join_settings(settings, policies, seed),
        size=size,
        classes=classes,
        mean=mean,
        std=std,
        guard=guard,
        device=device,
        name=name,
        num_workers=workers,
        threads=threads,
        snapshot_interval=snapshot_every,
        unready_after=unready_after,
        window_size=window,
        update_every=update_every,
        time_budget=budget,
        num_answers=feedback,
        keep_images=show_images or pictures,
        on_harm=_get_remedy(on_harm),
        limits=limits,
    )
    if ray is not None:
        if state is None:
            raise ConfigError(
                "--ray needs --state: a folder that all machines share, or a URL such as s3://bucket/name"
            )
        if cameras:
            raise ConfigError("--camera needs one process: give it to a service without --ray")
        if workers is None:
            recipe = replace(recipe, num_workers=max(1, int(shard_cpus)))
        if replicas is not None or replica_cpus is not None:
            warnings.warn(
                "--replicas and --replica-cpus have no effect: Ray starts a process for each of --shards when it is "
                "needed; give --shard-cpus, and stop the service by stopping its command",
                DeprecationWarning,
                stacklevel=2,
            )
        serve_on_ray(
            ray,
            recipe,
            state,
            num_shards=shards,
            num_cpus=shard_cpus,
            num_gpus=(0.02 if device.startswith("cuda") else 0.0) if shard_gpus is None else shard_gpus,
            tokens=tokens,
            host=host,
            port=port,
        )
        return
    if shards is not None or "://" in (state or ""):
        raise ConfigError("--shards, and a URL as --state, need --ray: one process saves its streams in a folder")
    with nullcontext(state) if state else tempfile.TemporaryDirectory(prefix="ctta-serve-") as folder:
        service = recipe.build(serving.StateDirectory(folder))

        def on_listening(address: str) -> None:
            header = ' -H "Authorization: Bearer $CTTA_SERVE_TOKEN"' if tokens else ""
            print_text(f"Listening on {address}")
            print_text(f"  curl{header} --data-binary @image.png {address}/streams/camera7/image")
            if state:
                print_text(f"The streams are saved in {state}.")
            else:
                print_text("The streams are not saved; use --state DIR to keep them.")

        serving.serve(
            service,
            host=host,
            port=port,
            tokens=tokens,
            cameras=cameras,
            on_listening=on_listening,
        )
        if state:
            num_streams = len(service.store.slots)
            print_text(f"Saved {num_streams} {'stream' if num_streams == 1 else 'streams'} in {state}.")
