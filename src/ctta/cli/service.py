"""The service that ``ctta serve`` describes, built in this process or in that of each shard on a cluster."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ctta import models
from ctta.cli.console import print_text
from ctta.cli.options import AdaptationOptions
from ctta.guard import Guarded, InputSpec
from ctta.serve import Service, StateDirectory, Tokens, build_method, resume_method
from ctta.serve.options import ServiceOptions, ShardOptions


@dataclass(frozen=True, kw_only=True)
class ServeAdaptationOptions(AdaptationOptions):
    """The network and the method of a service, whose batches come from its clients."""

    batch_size: int | None = None


@dataclass(frozen=True)
class ServiceRecipe:
    """What ``ctta serve`` makes a service of; picklable.

    Attributes:
        adaptation: Network and method.
        options: How the service treats its streams.
        guard: Whether streams are guarded.
        threads: Torch threads per worker.
    """

    adaptation: ServeAdaptationOptions
    options: ServiceOptions
    guard: bool
    threads: int

    def build(self, state: StateDirectory) -> Service:
        """Load the network, and build the method and the service.

        Args:
            state: Where the streams are kept.

        Returns:
            The service.
        """
        torch.set_num_threads(self.threads)
        chosen = self.adaptation.choose()
        if chosen.method:
            adaptive = build_method(chosen.net, chosen.method, chosen.texts)
        else:
            adaptive = resume_method(chosen.net, state.path, chosen.texts)
        size = chosen.size or ((32, 32) if chosen.model in models.CIFAR10_NETWORKS else None)
        if self.guard:
            spec = InputSpec(low=0, high=1, any_size=size is None)
            adaptive = Guarded(adaptive, input_spec=spec, estimator=chosen.estimator, on_harm=self.options.on_harm)
        class_names = self.options.class_names or models.class_names(chosen.model)
        return Service(adaptive, state, **vars(self.options) | {"image_size": size, "class_names": class_names})


def _make_absolute(spec: str | None) -> str | None:
    """Return the name of a network or method with an absolute path, if there is a path in it.

    >>> _make_absolute("file:/nets/mine.py:build"), _make_absolute("embedded")
    ('file:/nets/mine.py:build', 'embedded')
    """
    if spec is None or not spec.startswith("file:"):
        return spec
    path, separator, name = spec.removeprefix("file:").rpartition(":")
    return f"file:{os.path.abspath(path)}{separator}{name}"


def serve_on_ray(
    address: str, recipe: ServiceRecipe, state: str, shards: ShardOptions, *, tokens: Tokens, host: str, port: int
) -> None:
    """Serve on a Ray cluster until SIGTERM or Ctrl-C; a service that runs there already is taken over.

    Args:
        address: Address of the cluster, ``"auto"`` or ``"local"``.
        recipe: The service.
        state: Folder that all machines share, or a URL for fsspec.
        shards: How it is spread over the cluster.
        tokens: Tokens for clients and administrators.
        host: Address to listen on, on every machine.
        port: Port to listen on.
    """
    from ctta.serve.ray import RayOptions, RayService, connect

    # In another process, relative paths would start elsewhere.
    state, given, options = state if "://" in state else os.path.abspath(state), recipe.adaptation, recipe.options
    adaptation = replace(
        given,
        model=_make_absolute(given.model),
        method=_make_absolute(given.method),
        config=given.config and given.config.absolute(),
    )
    if shards.num_gpus is None:
        shards = replace(shards, num_gpus=0.02 if given.device.startswith("cuda") else 0.0)
    if options.num_workers is None:
        options = replace(options, num_workers=max(1, int(shards.num_cpus)))
    recipe = replace(recipe, adaptation=adaptation, options=options)
    connect(address)
    service = RayService(RayOptions(recipe.build, state, options.name, tokens, options.limits, **vars(shards)))
    service.start(host=host, port=port)
    print_text(f"Listening on http://{host}:{port}")
    print_text(f"The streams are saved in {state}.")
    wait_for_signal(lambda: not service.is_running)
    service.stop()
    print_text(f"Saved all streams in {state}.")


def wait_for_signal(is_over: Callable[[], bool]) -> None:
    """Wait for SIGTERM or Ctrl-C, or until something is over.

    Args:
        is_over: Asked every two seconds.
    """
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped.wait(2.0) and not is_over():
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
