"""One method on one network, served to many streams."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from prometheus_client import Gauge
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ctta.core.model import AdaptiveModel
from ctta.core.options import takes_options
from ctta.errors import ConfigError, InputError, annotate_network_errors
from ctta.guard.diagnostics import source_as_trained
from ctta.nn import uses_batch_statistics
from ctta.serve.audit import AuditLog
from ctta.serve.directory import StateDirectory
from ctta.serve.http import (
    STREAM_NAME_PATTERN,
    ApiError,
    MemoryBudget,
    hide_internal_errors,
    is_out_of_memory,
)
from ctta.serve.listing import StreamState, find_states
from ctta.serve.metrics import ServiceMetrics
from ctta.serve.options import ServiceOptions
from ctta.serve.persistence import StreamFactory
from ctta.serve.store import StreamStore
from ctta.serve.stream import (
    DEFAULT_UPDATE_EVERY,
    DEFAULT_WINDOW_SIZE,
    OVER_BUDGET,
    ImageFile,
    InferenceResult,
    ServedStream,
    TimeBudget,
)


class Service:
    """What the routes call: a model, its streams, and a directory that one process owns.

    Args:
        model: Model that every stream is a fork of. It takes images in [0, 1] and is not changed.
        state_dir: Directory of all streams; a service that was stopped or killed resumes from it. A shard of a
            service on several machines gets a :class:`~ctta.serve.directory.StateDirectory` that is shared.
        **options: The fields of :class:`~ctta.serve.options.ServiceOptions`.

    Raises:
        ConfigError: If the arguments contradict each other, the network or the streams in ``state_dir``, or if another
            process uses ``state_dir``.
    """

    @takes_options(ServiceOptions)
    def __init__(
        self, model: AdaptiveModel, state_dir: str | os.PathLike[str] | StateDirectory, options: ServiceOptions
    ) -> None:
        window_size, update_every, image_size = options.window_size, options.update_every, options.image_size
        if window_size is None:
            window_size = DEFAULT_WINDOW_SIZE if uses_batch_statistics(model.source) else 0
        if update_every is None:
            update_every = min(DEFAULT_UPDATE_EVERY, window_size) if window_size else 1
        num_workers = options.num_workers or max(1, (os.cpu_count() or 1) // 2)
        options = replace(options, window_size=window_size, update_every=update_every, num_workers=num_workers)
        TimeBudget(options.time_budget)  # raises now and not with the first image
        self.unready_after = options.unready_after or 4 * options.snapshot_interval
        limits = options.limits
        if not re.fullmatch(STREAM_NAME_PATTERN, options.name):  # it becomes part of URLs
            raise ConfigError(
                f"a model name has up to 64 letters, digits, dots, dashes and underscores, got {options.name!r}"
            )
        self.name, self.image_size, self.limits = options.name, image_size, limits
        self.metrics = ServiceMetrics()
        self.request_memory = MemoryBudget(limits.max_decoded_bytes, limits.request_timeout)
        model = model.fork()  # with a source of its own, and no images seen
        self.source_network, self._autocast = source_as_trained(model.source), model.autocast
        self._parameter = next(iter(model.source.parameters()), torch.empty(0))
        self.num_channels = _infer_num_channels(self.source_network)
        self.num_classes = None if image_size is None else int(self._predict_blank(image_size).shape[1])
        self.class_names = list(options.class_names) if options.class_names else None
        if self.class_names and self.num_classes not in (None, len(self.class_names)):
            raise ConfigError(
                f"got {len(self.class_names)} class names for a network with {self.num_classes} classes: "
                "give one per line, in the order of the network's outputs"
            )
        self._directory = state_dir if isinstance(state_dir, StateDirectory) else StateDirectory(state_dir)
        self.state_dir = self._directory.path
        try:
            self._directory.check_same_service(model)
            self.factory = StreamFactory(
                model,
                self.source_network,
                self._directory.open_snapshots(),
                AuditLog(self._directory.audit_file, self.metrics.count_event, self.metrics.audit_failures.inc),
                options,
            )
            self.store = StreamStore(self.factory, self.metrics, num_workers)
        except BaseException:
            self.release()
            raise
        # (height, width) of the last success, for which some stream's first image stands at the start.
        self._working_size = next((slot.image_size for slot in self.store.slots.values() if slot.image_size), None)
        self._add_gauges()

    async def infer(
        self,
        stream: str,
        images: Tensor | ImageFile,
        *,
        adapt: bool,
        check: Callable[[Tensor], object] | None = None,
        key: str | None = None,
    ) -> InferenceResult:
        """Predict images of a stream, which the first of them creates.

        Args:
            stream: Name of the stream.
            images: Images (N, C, H, W) in [0, 1]; or an image file, which is resized to the size of the stream's first
                image unless the service has an ``image_size``.
            adapt: Whether the images become part of the stream, and may cause an update.
            check: Called with the logits; the stream stays as it was if it raises.
            key: What the client calls the request, so that it counts once, however often it is sent.

        Returns:
            The logits, and whether the stream adapted.
        """
        self._check_images(images.pixels if isinstance(images, ImageFile) else images)

        def predict(served: ServedStream) -> InferenceResult:
            x, resized_to = images, None
            if isinstance(x, ImageFile):
                # Images of several sizes have no common window, so that the stream would never have enough to adapt.
                image = x if self.image_size else x.resize(served.image_size or x.size)
                x, resized_to = image.pixels, image.resized_to
            with self._explain_failures((x.shape[2], x.shape[3])):
                # One memory layout, since rounding depends on it: the one in which a window comes back from disk.
                x = x.to(self._parameter).contiguous()
                return served.infer(x, adapt=adapt, check=check, resized_to=resized_to, key=key)

        result = await self.store.run(stream, predict, create=True)
        if result.is_repeated:
            return result
        self.metrics.images.labels("adapted" if result.adapted else "predicted").inc(len(result.logits))
        self.metrics.updates.inc(result.adapted)
        self.metrics.updates_over_budget.inc(result.reason == OVER_BUDGET)
        return result

    async def feedback(
        self,
        stream: str,
        ids: Sequence[int],
        labels: Sequence[int | str] | None = None,
        *,
        right: Sequence[bool] | None = None,
    ) -> dict[str, Any]:
        """Take labels for some of the last answers of a stream, or whether they are right.

        Args:
            stream: Name of the stream.
            ids: Ids of the answers.
            labels: The right class of each: its number, or its name.
            right: Whether each is right, in place of labels.

        Returns:
            What the labels say about adaptation, as the API names it.
        """
        numbers = None if labels is None else [self._parse_label(label) for label in labels]
        summary, num_unknown = await self.store.run(stream, lambda served: served.feedback(ids, numbers, right))
        return {"stream": stream, **summary.as_dict(), "unknown": num_unknown}

    def _parse_label(self, label: int | str) -> int:
        if isinstance(label, str):
            if label not in (self.class_names or ()):
                raise ApiError(400, f"there is no class {label!r}: give one of --classes, or the number of a class")
            return (self.class_names or []).index(label)
        if label < 0 or (self.num_classes is not None and label >= self.num_classes):
            raise ApiError(400, f"there is no class {label}: expected numbers from 0, below the number of classes")
        return label

    def predict_source(self, x: Tensor) -> Tensor:
        """Predict with the source network as it was trained.

        Args:
            x: Images (N, C, H, W) in [0, 1].

        Returns:
            The logits.
        """
        self._check_images(x)
        task = "a prediction of the source network"
        with hide_internal_errors(task, self.metrics.count_failure), self._explain_failures((x.shape[2], x.shape[3])):
            return self._call_source(x)

    def _call_source(self, x: Tensor) -> Tensor:
        with annotate_network_errors(x), torch.no_grad(), self._autocast():
            logits: Tensor = self.source_network(x.to(self._parameter))
        return logits.to(self._parameter)

    @contextmanager
    def _explain_failures(self, size: tuple[int, int]) -> Iterator[None]:
        """Raise :class:`ApiError` with status 400 if the block fails because of the (height, width) of the images.

        A network may take images of one size only, and raises whatever it likes for others. Where nobody declared the
        size, a failure is explained by the size if the network as it was trained fails on an image of that size too,
        and not on one of a size that has worked before. Any other failure, and any before the first success, is the
        network's.
        """
        try:
            yield
        except (ApiError, InputError):
            raise
        except Exception as error:
            works = self._working_size
            if is_out_of_memory(error) or works in (None, size) or not self._is_taken(works) or self._is_taken(size):
                raise
            message = f"the network takes no images of {list(size)} pixels: send images of another size"
            raise ApiError(400, f"{message}, such as {list(works)}") from error
        self._working_size = size

    def _is_taken(self, size: tuple[int, int]) -> bool:
        """Return whether the network as it was trained takes a black image of a (height, width)."""
        try:
            self._predict_blank(size)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        return True

    def _predict_blank(self, size: tuple[int, int]) -> Tensor:
        return self._call_source(torch.zeros(1, self.num_channels, *size))

    def _check_images(self, x: Tensor) -> None:
        """Raise ApiError unless these are images (N, C, H, W) in [0, 1] of a size that is served."""
        if x.ndim != 4 or x.numel() == 0 or x.shape[1] != self.num_channels:
            raise ApiError(400, f"expected images (N, {self.num_channels}, height, width), got shape {list(x.shape)}")
        if len(x) > self.limits.max_batch:
            raise ApiError(413, f"got {len(x)} images, and a request may have {self.limits.max_batch}: send fewer")
        if self.image_size and tuple(x.shape[2:]) != self.image_size:
            raise ApiError(400, f"expected images of {list(self.image_size)} pixels, got {list(x.shape[2:])}")
        if max(x.shape[2:]) > self.limits.max_side:
            raise ApiError(413, f"got a side of {max(x.shape[2:])} pixels, and {self.limits.max_side} are allowed")
        low, high = x.aminmax()
        if not (low >= 0 and high <= 1):  # also if NaN
            raise ApiError(400, "expected images in [0, 1] without NaN")

    def classify(self, logits: Tensor) -> dict[str, Any]:
        """Return the most probable class of the first image.

        Args:
            logits: Logits (N, classes).

        Returns:
            Class number, label and confidence, as the API names them.

        Raises:
            ApiError: If the network does not predict one class per image.
            ConfigError: If there are more or fewer class names than classes, which is the operator's mistake.
        """
        if logits.ndim != 2:
            raise ApiError(
                400,
                f"the network predicts shape {list(logits.shape[1:])} per image and not one class: use the tensor API",
            )
        if self.class_names and len(self.class_names) != logits.shape[1]:
            raise ConfigError(
                f"got {len(self.class_names)} class names for a network with {logits.shape[1]} classes: correct "
                "--classes, and give --size to have it checked at the start"
            )
        probability, number = logits[0].double().softmax(0).nan_to_num(0.0).max(0)
        label = self.class_names[int(number)] if self.class_names else None
        return {"class": int(number), "label": label, "confidence": round(float(probability), 6)}

    def check_ready(self) -> None:
        """Raise ApiError with status 503 if the service shuts down, or cannot save what has changed."""
        self.store.check_open()
        if self.store.unsaved_seconds > self.unready_after:
            message = f"changes have not been saved for {self.store.unsaved_seconds:.0f} s: see the service's log"
            raise ApiError(503, message, retry_after=30)

    def release(self) -> None:
        """Let another process use the directory."""
        self._directory.release()

    def _add_gauges(self) -> None:
        store = self.store

        def count(state: StreamState) -> int:
            return sum(state in find_states(slot) for slot in list(store.slots.values()))

        for name, text, value in (
            ("streams", "Streams in memory and on disk.", lambda: len(store.slots)),
            ("live_streams", "Streams in memory.", lambda: store.num_live),
            ("live_bytes", "Memory of the live streams without their source.", lambda: store.num_live_bytes),
            ("waiting_requests", "Requests that wait or are being worked on.", lambda: store.num_waiting),
            ("unsaved_seconds", "Age of the oldest change that is not saved.", lambda: store.unsaved_seconds),
            ("estimated_gain", "Mean estimated gain of accuracy over no adaptation.", lambda: store.estimated_gain),
            ("harmed_streams", "Streams whose labels show harm by adaptation.", lambda: count(StreamState.HARMED)),
            ("alarmed_streams", "Streams with a collapse score of 1 or more.", lambda: count(StreamState.ALARM)),
        ):
            Gauge(f"ctta_{name}", text, registry=self.metrics.registry).set_function(value)
        self.metrics.add_streams(store.list_health)


def _infer_num_channels(net: nn.Module) -> int:
    first = next((module for module in net.modules() if isinstance(module, _ConvNd)), None)
    return 3 if first is None else first.in_channels
