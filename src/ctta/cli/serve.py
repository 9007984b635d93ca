"""``ctta serve``: serve an adaptive model over HTTP."""

import os
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta import models
from ctta.cli.console import print_text
from ctta.cli.options import AdaptationOptions, command, list_given, parse_every
from ctta.core.options import Option
from ctta.data.datasets.video import FrameSampling
from ctta.errors import ConfigError
from ctta.guard import Guarded, InputSpec
from ctta.io.atomic import parse_local_path
from ctta.io.python_files import absolute_file_spec

try:
    import ctta.serve as serving
    from ctta.serve.app import ServerOptions, handle_signals
    from ctta.serve.options import LIMITS, SERVER, STREAMS, Limits, ServiceOptions, ShardOptions
except ModuleNotFoundError as error:
    if (error.name or "").startswith("ctta"):
        raise
    raise ImportError(f"serving needs {error.name}, which is not installed: pip install 'ctta[serve]'") from error


@dataclass(frozen=True, kw_only=True)
class ServeAdaptationOptions(AdaptationOptions):
    """The network and the method of a service, whose batches come from its clients."""

    batch_size: int | None = None


@dataclass(frozen=True)
class ServiceRecipe:
    """What ``ctta serve`` makes a service of; picklable."""

    adaptation: ServeAdaptationOptions
    options: ServiceOptions
    guard: bool
    threads: int

    def build(self, state: serving.StateDirectory) -> serving.Service:
        """Load the network, and build the method and the service, whose streams are kept in a directory."""
        torch.set_num_threads(self.threads)
        chosen = self.adaptation.choose()
        if chosen.method:
            adaptive = serving.build_method(chosen.net, chosen.method, chosen.texts)
        else:
            adaptive = serving.resume_method(chosen.net, state.path, chosen.texts)
        size = chosen.size or ((32, 32) if chosen.model in models.CIFAR10_NETWORKS else None)
        if self.guard:
            spec = InputSpec(low=0, high=1, any_size=size is None)
            adaptive = Guarded(adaptive, input_spec=spec, on_harm=self.options.on_harm)
        class_names = self.options.class_names or models.class_names(chosen.model)
        return serving.Service(adaptive, state, **vars(self.options) | {"image_size": size, "class_names": class_names})


@command
def serve(
    *,
    adaptation: ServeAdaptationOptions,
    guard: Annotated[bool, Option("Monitor each stream, and roll it back when it collapses.")] = True,
    server: ServerOptions,
    token_file: Annotated[
        Path | None, Option("Read the clients' token from this file. Default: $CTTA_SERVE_TOKEN.", "FILE", panel=SERVER)
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        Option("Read the operators' token from this file. Default: $CTTA_SERVE_ADMIN_TOKEN.", "FILE", panel=SERVER),
    ] = None,
    threads: Annotated[int, Option("Use N torch threads per worker.", "N", min=1, panel=SERVER)] = 1,
    ray: Annotated[
        str | None,
        Option(
            "Serve on the Ray cluster at this address; auto finds one, local starts one. Needs --state. "
            "Default: one process, no cluster.",
            "ADDRESS",
            panel=SERVER,
        ),
    ] = None,
    shards: ShardOptions,
    state: Annotated[
        str | None,
        Option(
            "Save the streams in this folder, and resume those found there; with --ray, a folder that all machines "
            "share. Default: not saved.",
            "DIR",
            panel=STREAMS,
        ),
    ] = None,
    camera: Annotated[
        Sequence[str],
        Option(
            "Read this camera (rtsp://..., /dev/video0) or video file and feed its frames to the stream NAME; "
            "repeatable. See /cameras. Default: none.",
            "NAME=ADDRESS",
            repeatable=True,
            panel=STREAMS,
        ),
    ] = (),
    every: Annotated[
        str, Option("Take every N-th frame of a --camera, or one per interval, such as 0.5s.", "N|Ns", panel=STREAMS)
    ] = "1",
    options: ServiceOptions,
    limits: Limits,
    memory: Annotated[
        int, Option("Use at most this much memory for streams and requests.", "MB", min=1, panel=LIMITS)
    ] = 4096,
    request_memory: Annotated[
        int | None,
        Option(
            "Use this part of --memory for bodies and what is decoded from them; more wait. Default: a quarter.",
            "MB",
            min=1,
            panel=LIMITS,
        ),
    ] = None,
    body: Annotated[int, Option("Reject larger requests.", "MB", min=1, panel=LIMITS)] = 16,
    source: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    pictures: Annotated[bool, typer.Option("--pictures", hidden=True)] = False,
    replicas: Annotated[int | None, typer.Option(hidden=True)] = None,
    replica_cpus: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve an adaptive model over HTTP: images in, labels out, for many cameras at once.

    Each stream (a camera, a production line, a ward) adapts on its own, and is
    created by its first image. There is a status page at /, an image endpoint
    for curl, and the Open Inference Protocol of Triton and KServe. After a
    stop or kill, run the same command again to resume every saved stream.
    """
    for old, is_given, advice in (
        ("--source", source, "give --camera"),
        ("--pictures", pictures, "give --show-images"),
        (
            "--replicas",
            replicas is not None,
            "it has no effect; see --shards, and stop the command to stop the service",
        ),
        ("--replica-cpus", replica_cpus is not None, "it has no effect; see --shard-cpus"),
    ):
        if is_given:
            warnings.warn(f"{old} is deprecated: {advice}", DeprecationWarning, stacklevel=2)
    tokens = serving.read_tokens(token_file, admin_token_file)
    serving.check_host(server.host, tokens)
    if request_memory is None:
        request_memory = max(memory // 4, 2 * body)
    if request_memory >= memory:
        raise ConfigError(
            f"--memory {memory} leaves nothing for the streams, as requests may use {request_memory} MB: give a larger "
            "--memory, or a smaller --request-memory or --body"
        )
    limits = replace(
        limits,
        max_live_bytes=(memory - request_memory) * 2**20,
        max_request_bytes=request_memory * 2**20,
        max_body_bytes=body * 2**20,
    )
    sampling = FrameSampling(**parse_every(every))
    cameras = [serving.StreamCamera.parse(text, sampling) for text in [*(camera or ()), *(source or ())]]
    options = replace(options, limits=limits, keep_images=options.keep_images or pictures)
    recipe = ServiceRecipe(adaptation, options, guard, threads)
    if ray is not None:
        if state is None:
            raise ConfigError("--ray needs --state: a folder that all machines share")
        if cameras:
            raise ConfigError("--camera needs one process: give it to a service without --ray")
        serve_on_ray(ray, recipe, state, shards, tokens, server)
        return
    if given := list_given(shards):
        raise ConfigError(f"{given[0]} needs --ray: one process serves all streams")
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

        changes = {"tokens": tokens, "cameras": cameras, "on_listening": on_listening}
        serving.serve(service, **vars(server) | changes)
        if state:
            num_streams = len(service.store.slots)
            print_text(f"Saved {num_streams} {'stream' if num_streams == 1 else 'streams'} in {state}.")


def serve_on_ray(
    address: str, recipe: ServiceRecipe, state: str, shards: ShardOptions, tokens: serving.Tokens, server: ServerOptions
) -> None:
    """Serve on a Ray cluster until SIGTERM or Ctrl-C; a service that runs there already is taken over.

    The address is ``"auto"``, ``"local"`` or that of a cluster; all machines listen as ``server`` says. The state is a
    folder that all machines share.
    """
    from ctta.serve.ray import RayOptions, RayService, connect

    # In another process, relative paths would start elsewhere.
    state, given, options = os.path.abspath(parse_local_path(state)), recipe.adaptation, recipe.options
    adaptation = replace(
        given,
        model=given.model and absolute_file_spec(given.model),
        method=given.method and absolute_file_spec(given.method),
        config=given.config and given.config.absolute(),
    )
    if shards.num_gpus is None:
        shards = replace(shards, num_gpus=0.02 if given.device.startswith("cuda") else 0.0)
    if options.num_workers is None:
        options = replace(options, num_workers=max(1, int(shards.num_cpus)))
    recipe = replace(recipe, adaptation=adaptation, options=options)
    connect(address)
    stopped = threading.Event()
    # From here on, as a service that was started must be stopped. Ray has set handlers of its own when it connected.
    with handle_signals(stopped.set):
        service = RayService(RayOptions(recipe.build, state, options.name, tokens, options.limits, **vars(shards)))
        service.start(host=server.host, port=server.port)
        try:
            print_text(f"Listening on http://{server.host}:{server.port}")
            print_text(f"The streams are saved in {state}.")
            while not stopped.wait(2.0) and service.is_running:
                service.start_fronts(host=server.host, port=server.port)  # of machines that were added
        finally:
            service.stop()
    print_text(f"Saved all streams in {state}.")
