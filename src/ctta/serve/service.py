"""One method over one network, served to many streams."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ctta.base import AdaptiveModel
from ctta.checkpoint.fingerprint import source_fingerprint
from ctta.errors import annotate_network_errors
from ctta.evaluation.journal import write_atomically
from ctta.guard.untouched import untouched
from ctta.hyperparameters import format_hyperparameters
from ctta.norms import uses_batch_statistics
from ctta.serve.budget import TimeBudget
from ctta.serve.errors import Refusal
from ctta.serve.events import AuditLog
from ctta.serve.factory import StreamFactory
from ctta.serve.limits import Limits
from ctta.serve.metrics import Metrics
from ctta.serve.names import checked_name
from ctta.serve.snapshots import Snapshots
from ctta.serve.store import Store
from ctta.serve.stream import Answer, refusing_bad_input
from ctta.serve.watching import method_of
from ctta.serve.window import UPDATE_EVERY, WINDOW


class Service:
    """What the routes call.

    Args:
        model: what every stream is a fork of; it takes images in [0, 1] and is not changed.
        state: the folder of all streams; a service that was stopped or killed goes on from it.
        name: of the model, for clients of the Open Inference Protocol.
        size: (height, width) that pictures are resized to, and that other inputs must have.
        classes: names of the classes.
        window: how many of its last images a stream keeps to be normalised with; by itself 0 where no layer needs it.
        update_every: images between two updates, where requests bring fewer than the window holds.
        budget: share of its time that a stream may spend on adapting; None for no limit.
        limits: what is too much.
        workers: streams that work at once; by itself one for every two cores.
        snapshot_every: seconds between two snapshots of a stream that changes.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        state: str | os.PathLike[str],
        *,
        name: str = "ctta",
        size: tuple[int, int] | None = None,
        classes: Sequence[str] | None = None,
        window: int | None = None,
        update_every: int | None = None,
        budget: float | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        workers: int | None = None,
        snapshot_every: float = 30.0,
    ) -> None:
        if window is None:
            window = WINDOW if uses_batch_statistics(model.source) else 0
        if update_every is None:
            update_every = min(UPDATE_EVERY, window) if window else 1
        if window < 0 or update_every < 1:
            raise ValueError(f"a window of {window} images with an update every {update_every} makes no sense")
        TimeBudget(budget)  # refuses one that is none, now and not with the first image
        if snapshot_every <= 0:
            raise ValueError(f"the seconds between snapshots must be positive, got {snapshot_every}")
        self.name, self.size, self.limits = checked_model_name(name), size, limits
        self.metrics = Metrics()
        model = model.fork()  # with a source of its own, and nothing seen
        self.reference = untouched(model.source)
        self._parameter = next(iter(model.source.parameters()), torch.empty(0))
        self.num_channels = _num_channels(self.reference)
        self.num_classes = self._probed_classes()
        self.classes = list(classes) if classes else None
        if self.classes and self.num_classes not in (None, len(self.classes)):
            raise ValueError(f"there are {len(self.classes)} names for the network's {self.num_classes} classes")
        self.folder = Path(state)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_of(self.folder)
        try:
            self._open(model, window, update_every, budget, workers, snapshot_every)
        except BaseException:
            self.release()
            raise

    def _open(
        self,
        model: AdaptiveModel,
        window: int,
        update_every: int,
        budget: float | None,
        workers: int | None,
        snapshot_every: float,
    ) -> None:
        """What needs the folder."""
        _check_same(self.folder, model)
        self.factory = StreamFactory(
            model,
            self.reference,
            Snapshots(self.folder / "streams"),
            AuditLog(self.folder / "audit.jsonl", self.metrics.count_event),
            window,
            update_every,
            budget,
        )
        workers = workers or max(1, (os.cpu_count() or 1) // 2)
        self.store = Store(self.factory, self.limits, workers=workers, snapshot_every=snapshot_every)

    async def infer(self, stream: str, x: Tensor, *, adapt: bool) -> Answer:
        """Logits for images of a stream, which comes into being with the first of them."""
        self.check_images(x)
        # Of one layout in memory, since rounding depends on it, and a window comes back from disk in this one.
        x = x.to(self._parameter).contiguous()
        answer = await self.store.run(checked_name(stream), lambda served: served.infer(x, adapt=adapt), create=True)
        self.metrics.count_answer(answer, len(x))
        return answer

    def source_logits(self, x: Tensor) -> Tensor:
        """What the network says without adapting."""
        with refusing_bad_input(x), torch.no_grad():
            logits: Tensor = self.reference(x.to(self._parameter))
        return logits

    def check_images(self, x: Tensor) -> None:
        """Images (N, C, H, W) in [0, 1] of a size that is served, or a refusal."""
        if x.ndim != 4 or x.numel() == 0 or x.shape[1] != self.num_channels:
            raise Refusal(400, f"expected images (N, {self.num_channels}, height, width), got shape {list(x.shape)}")
        if len(x) > self.limits.batch:
            raise Refusal(413, f"{len(x)} images are more than the {self.limits.batch} that a request may have")
        if self.size and tuple(x.shape[2:]) != self.size:
            raise Refusal(400, f"expected images of {list(self.size)} pixels, got {list(x.shape[2:])}")
        if max(x.shape[2:]) > self.limits.side:
            raise Refusal(413, f"an image side of {max(x.shape[2:])} pixels is more than {self.limits.side}")
        low, high = x.aminmax()
        if not (low >= 0 and high <= 1):  # also where it is NaN
            raise Refusal(400, "expected images in [0, 1], without NaN")

    def label(self, logits: Tensor) -> dict[str, Any]:
        """The most probable class of one image."""
        if logits.ndim != 2:
            raise Refusal(400, f"the network's answer has shape {list(logits.shape[1:])}, which is no single class")
        if self.classes and len(self.classes) != logits.shape[1]:
            raise Refusal(409, f"there are {len(self.classes)} names for the network's {logits.shape[1]} classes")
        probability, number = logits[0].double().softmax(0).nan_to_num(0.0).max(0)
        name = self.classes[int(number)] if self.classes else None
        return {"class": int(number), "label": name, "confidence": round(float(probability), 6)}

    def release(self) -> None:
        """Let another process have the folder."""
        self._lock.release()

    def _probed_classes(self) -> int | None:
        """How many classes the network has; None if it is not known which images it takes."""
        if self.size is None:
            return None
        x = torch.zeros(1, self.num_channels, *self.size).to(self._parameter)
        with annotate_network_errors(x), torch.no_grad():
            return int(self.reference(x).shape[1])


def checked_model_name(name: str) -> str:
    """A name that can stand in an address."""
    try:
        return checked_name(name)
    except Refusal:
        raise ValueError(f"a model's name has letters, digits, dots, dashes and underscores, got {name!r}") from None


def _num_channels(net: nn.Module) -> int:
    first = next((module for module in net.modules() if isinstance(module, _ConvNd)), None)
    return 3 if first is None else first.in_channels


def _lock_of(folder: Path) -> FileLock:
    """Two services with one folder would overwrite each other's streams."""
    lock = FileLock(folder / "lock", thread_local=False)  # released by the thread that serves
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process serves the streams in {folder}: stop it, or give another folder") from None
    return lock


def _check_same(folder: Path, model: AdaptiveModel) -> None:
    """Streams of another network or method cannot be gone on with; better said now than at each of them."""
    path, now = folder / "service.json", _described(model)
    if not path.exists():
        write_atomically(path, json.dumps(now, indent=1))
        return
    before = json.loads(path.read_text())
    for key, value in now.items():
        if before.get(key) != value:
            raise ValueError(
                f"the streams in {folder} were begun with {key} {before.get(key)}, and now it is {value}: "
                "give another folder, or what they were begun with"
            )


def _described(model: AdaptiveModel) -> dict[str, str]:
    method = method_of(model)
    return {
        "network": source_fingerprint(model.source),
        "method": type(method).__name__,
        "settings": format_hyperparameters(method.hyperparameters),
        "guard": "none" if model is method else format_hyperparameters(model.hyperparameters),
    }
