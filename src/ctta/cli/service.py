"""The service that ``ctta serve`` describes, built in this process or in that of each shard on a cluster."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ctta import models
from ctta.cli.console import print_text
from ctta.cli.options import choose_adaptation
from ctta.core.options import read_class_names
from ctta.guard import Guarded, InputSpec

if TYPE_CHECKING:
    from ctta.serve import Limits, Service, Tokens
    from ctta.serve.directory import StateDirectory


@dataclass(frozen=True)
class ServiceRecipe:
    """The options of ``ctta serve`` that make up a service, with their values as typed; picklable."""

    model: str | None
    config: Path | None
    method: str | None
    texts: list[str]
    size: tuple[int, int] | None
    classes: Path | None
    mean: str | None
    std: str | None
    guard: bool
    device: str
    name: str
    num_workers: int | None
    threads: int
    snapshot_interval: float
    unready_after: float | None
    window_size: int | None
    update_every: int | None
    time_budget: float | None
    num_answers: int
    keep_images: bool
    on_harm: Literal["reset", "freeze"] | None
    limits: "Limits"

    def build(self, state: "StateDirectory") -> "Service":
        """Load the network, and build the method and the service.

        Args:
            state: Where the streams are kept.

        Returns:
            The service.
        """
        import ctta.serve as serving

        torch.set_num_threads(self.threads)
        chosen = choose_adaptation(
            self.config,
            model=self.model,
            method=self.method,
            texts=self.texts,
            mean=self.mean,
            std=self.std,
            size=self.size,
            device=self.device,
        )
        class_names = (read_class_names(self.classes) if self.classes else None) or models.class_names(chosen.model)
        if chosen.method:
            adaptive = serving.build_method(chosen.net, chosen.method, chosen.texts)
        else:
            adaptive = serving.resume_method(chosen.net, state.path, chosen.texts)
        size = chosen.size or ((32, 32) if chosen.model in models.CIFAR10_NETWORKS else None)
        if self.guard:
            spec = InputSpec(low=0, high=1, any_size=size is None)
            adaptive = Guarded(adaptive, input_spec=spec, estimator=chosen.estimator, on_harm=self.on_harm)
        return serving.Service(
            adaptive,
            state,
            name=self.name,
            image_size=size,
            class_names=class_names,
            window_size=self.window_size,
            update_every=self.update_every,
            time_budget=self.time_budget,
            limits=self.limits,
            num_workers=self.num_workers,
            snapshot_interval=self.snapshot_interval,
            unready_after=self.unready_after,
            num_answers=self.num_answers,
            keep_images=self.keep_images,
            on_harm=self.on_harm,
        )


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
    address: str,
    recipe: ServiceRecipe,
    state: str,
    *,
    num_shards: int | None,
    num_cpus: float,
    num_gpus: float,
    tokens: "Tokens",
    host: str,
    port: int,
) -> None:
    """Serve on a Ray cluster until SIGTERM or Ctrl-C; a service that runs there already is taken over.

    Args:
        address: Address of the cluster, ``"auto"`` or ``"local"``.
        recipe: The service.
        state: Folder that all machines share, or a URL for fsspec.
        num_shards: Number of shards; None for the default.
        num_cpus: CPUs that each shard reserves.
        num_gpus: GPUs that each shard reserves.
        tokens: Tokens for clients and administrators.
        host: Address to listen on, on every machine.
        port: Port to listen on.
    """
    from ctta.serve.ray import NUM_SHARDS, RayOptions, RayService, connect

    # In another process, relative paths would start elsewhere.
    state = state if "://" in state else os.path.abspath(state)
    recipe = replace(
        recipe,
        model=_make_absolute(recipe.model),
        method=_make_absolute(recipe.method),
        config=recipe.config and recipe.config.absolute(),
        classes=recipe.classes and recipe.classes.absolute(),
    )
    connect(address)
    service = RayService(
        RayOptions(
            recipe.build,
            state,
            recipe.name,
            tokens,
            recipe.limits,
            num_shards=num_shards or NUM_SHARDS,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
    )
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
