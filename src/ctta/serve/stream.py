"""One stream: a model that adapts, with its window, its time budget and its history."""

import copy
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctta.core.model import AdaptiveModel
from ctta.core.transaction import restore_on_error
from ctta.errors import ConfigError, InputError, annotate_network_error
from ctta.functional import confidence
from ctta.guard import Event, EventKind, FeedbackSummary, Monitored
from ctta.guard.answers import AccuracyTracker, AnswerLog
from ctta.guard.health import STATE_CHANGES
from ctta.io.tensors import to_bytes
from ctta.nn import batch_fraction
from ctta.serve.audit import AuditLog, StreamEvent
from ctta.serve.http import ApiError
from ctta.serve.options import ServiceOptions

logger = logging.getLogger("ctta.serve")

NUM_POINTS = 120  # of a curve on the live page
NUM_EVENTS = 50
OVER_BUDGET = "the time budget for adaptation is used up"
PAUSED = "the guard has paused adaptation"
# Chosen by benchmarks/choose/window.py; see docs/results/choices.md.
DEFAULT_WINDOW_SIZE = 16
DEFAULT_BATCH_STATS = 0.5
DEFAULT_UPDATE_EVERY = 4  # images
MIN_BATCH_SIZE = 4  # images from which on their statistics beat the source's

#: What a snapshot holds of the result of a request with an idempotency key, beside its logits and ids.
_KEPT_FIELDS = ("num_updates", "adapted", "batch_stats", "reason", "resized_to")
MAX_KEYS, MAX_KEYED_BYTES = 64, 2**18  # of requests with an idempotency key, and of their logits
MAX_SAVINGS = 10.0  # seconds of wall time whose budget can be saved up
#: Attributes of a stream that a request changes, beside its model.
RECORDS: tuple[str, ...] = ("num_requests", "num_images", "num_over_budget", "num_resized", "num_changes", "used_at")
RECORDS += ("image_size", "window", "confidences", "collapse_scores", "events")


class SampleWindow:
    """The newest images of a stream, oldest first, so that a single image has a batch to be normalized with.

    With a size of 0, every request is a batch by itself; else one that fills the window always causes an update.
    """

    def __init__(self, size: int, update_every: int) -> None:
        self.size, self.update_every = size, update_every
        self.images: Tensor | None = None
        self.num_since_update = 0

    def make_batch(self, x: Tensor) -> Tensor:
        """Return the new images, preceded by as many old ones of the same shape as the window has room for."""
        count = self._num_old(x)
        return x if self.images is None or not count else torch.cat([self.images[-count:].to(x), x])

    def is_large_enough(self, x: Tensor) -> bool:
        """Return whether the batch of new images can be normalized with its own statistics."""
        return self._num_old(x) + len(x) >= min(MIN_BATCH_SIZE, self.size)

    def _num_old(self, x: Tensor) -> int:
        if self.images is None or self.images.shape[1:] != x.shape[1:]:
            return 0
        return min(len(self.images), max(0, self.size - len(x)))

    def is_update_due(self, num_new: int) -> bool:
        """Return whether the stream should update once that many new images have arrived."""
        return self.num_since_update + num_new >= self.update_every

    def push(self, x: Tensor, *, updated: bool) -> None:
        """Add new images, and record whether the stream was updated."""
        if self.size:
            # A new tensor: copies of the window keep the old one.
            self.images = self.make_batch(x)[-self.size :].clone(memory_format=torch.contiguous_format)
        self.num_since_update = 0 if updated else self.num_since_update + len(x)

    def clear(self) -> None:
        """Remove all images."""
        self.images, self.num_since_update = None, 0


class TimeBudget:
    """A fraction of wall time that a stream may spend on updates, None for all; unused time is saved up to a limit.

    >>> now = 0.0
    >>> budget = TimeBudget(0.5, clock=lambda: now)
    >>> with budget.spend():
    ...     now = 20.0
    >>> budget.is_exhausted
    True
    >>> now = 60.0
    >>> budget.is_exhausted
    False
    """

    def __init__(self, fraction: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"the time budget must be a fraction above 0 and up to 1, got {fraction!r}")
        self.fraction, self._clock = fraction, clock
        self._credit, self._counted_at = MAX_SAVINGS * (fraction or 0), clock()

    @property
    def is_exhausted(self) -> bool:
        """Whether the next update has to be skipped."""
        if self.fraction is None:
            return False
        now = self._clock()
        self._credit = min(self._credit + (now - self._counted_at) * self.fraction, MAX_SAVINGS * self.fraction)
        self._counted_at = now
        return self._credit <= 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Charge the time that the block takes."""
        started = self._clock()
        try:
            yield
        finally:
            self._credit -= self._clock() - started


@dataclass(frozen=True)
class InferenceResult:
    """Answer of a stream to a request."""

    logits: Tensor  # one row per image of the request
    num_updates: int  # of the stream so far
    adapted: bool  # whether the request caused an update
    batch_stats: float  # fraction of the batch in the statistics that normalized the images; the rest is the source's
    reason: str | None = None  # why there was no update, if adaptation was requested
    resized_to: tuple[int, int] | None = None  # (height, width) of an image file that had another size
    ids: range | None = None  # for feedback; None if the stream remembers no answers, or the images are not part of it
    is_repeated: bool = False  # whether this answers a request that was carried out before


@dataclass(frozen=True)
class ImageFile:
    """An image file that was decoded."""

    pixels: Tensor  # a batch of one (1, 3, height, width) in [0, 1]
    size: tuple[int, int]  # (height, width) of the file
    decode: Callable[[tuple[int, int]], Tensor]  # returns the pixels, resized to another (height, width)

    @property
    def resized_to(self) -> tuple[int, int] | None:
        """(height, width) of the pixels; None if it is that of the file."""
        height, width = self.pixels.shape[2:]
        return None if (height, width) == self.size else (height, width)

    def resize(self, size: tuple[int, int]) -> "ImageFile":
        """Return the same file with pixels of a size."""
        return self if tuple(self.pixels.shape[2:]) == size else replace(self, pixels=self.decode(size))


class KeyedResults:
    """The results of the last requests with an idempotency key, so that a request that is sent again counts once."""

    def __init__(self) -> None:
        self._results: dict[
            str, tuple[str, InferenceResult]
        ] = {}  # by the key, with a hash of the images; oldest first

    def find(self, key: str, x: Tensor) -> InferenceResult | None:
        """Return the result of the request with a key, if there was one; ApiError if that cannot be the answer."""
        digest, result = self._results.get(key, ("", None))
        if result is None:
            return None
        if digest != _hash_images(x):
            raise ApiError(
                409, f"the Idempotency-Key {key!r} was used for other images: use a new key for each request"
            )
        if not result.logits.numel():
            raise ApiError(
                409,
                f"the request with the Idempotency-Key {key!r} has counted already, and its answer was too large to be "
                "kept: send it with adapt=false for a prediction",
            )
        return replace(result, is_repeated=True)

    def add(self, key: str, x: Tensor, result: InferenceResult) -> None:
        """Keep the result of a request, without its logits if they are too large."""
        # A copy, and an empty one below: a part of a tensor keeps the memory of the whole.
        self._results[key] = (_hash_images(x), replace(result, logits=result.logits.clone()))
        num_bytes = 0
        for number, (each, (digest, kept)) in enumerate(reversed(list(self._results.items()))):
            num_bytes += kept.logits.nbytes
            if number >= MAX_KEYS:
                del self._results[each]
            elif num_bytes > MAX_KEYED_BYTES:
                self._results[each] = (digest, replace(kept, logits=kept.logits[:0].clone()))

    def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Return what JSON can hold of each result, and the logits by their position."""
        entries, tensors = [], {}
        for number, (key, (digest, result)) in enumerate(self._results.items()):
            ids = result.ids and [result.ids.start, result.ids.stop]
            kept = {name: getattr(result, name) for name in _KEPT_FIELDS}
            entries.append({"key": key, "images": digest, **kept, "ids": ids})
            tensors[str(number)] = result.logits
        return entries, tensors

    def load_state_dict_(self, entries: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        """Take over the results of a :meth:`state_dict`, but those that another version wrote in another form."""
        for number, entry in enumerate(entries):
            try:
                fields = {name: entry[name] for name in _KEPT_FIELDS}
                size, ids = fields["resized_to"], entry["ids"]
                fields |= {"resized_to": size and (size[0], size[1]), "ids": ids and range(*ids)}
                self._results[entry["key"]] = (entry["images"], InferenceResult(tensors[str(number)], **fields))
            except (LookupError, TypeError, ValueError) as error:
                logger.warning("an Idempotency-Key is forgotten, for its entry cannot be used (%r): %s", error, entry)


def _hash_images(x: Tensor) -> str:
    return hashlib.blake2b(to_bytes(x), digest_size=16).hexdigest()


class ServedStream:
    """A model with its window and history. One thread at a time may call it.

    A call that fails leaves the stream as it was. The source network, as it was trained, answers until there are enough
    images. The options have a ``window_size`` and ``update_every``.
    """

    def __init__(
        self, name: str, model: AdaptiveModel, source_network: nn.Module, log: AuditLog, options: ServiceOptions
    ) -> None:
        self.name, self.source_network, self.log, self.options = name, source_network, log, options
        self.window = SampleWindow(options.window_size or 0, options.update_every or 1)
        self.budget = TimeBudget(options.time_budget)
        self.answers = AnswerLog(options.num_answers) if options.num_answers else None
        self.keyed = KeyedResults()
        self.last_image: Tensor | None = None  # the last image, as bytes (C, H, W)
        self.num_requests = self.num_images = self.num_over_budget = self.num_resized = 0
        self.image_size: tuple[int, int] | None = None  # of the first image
        self.used_at = time.time()
        self.confidences: deque[float | None] = deque(maxlen=NUM_POINTS)
        self.collapse_scores: deque[float | None] = deque(maxlen=NUM_POINTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)
        self.num_changes = 0  # since the stream is in memory, to tell whether there is anything to save
        self._last_guard_event: Event | None = None
        self._replace_model(model)

    # ---- inference ----

    def infer(
        self,
        x: Tensor,
        *,
        adapt: bool,
        check: Callable[[Tensor], object] | None = None,
        resized_to: tuple[int, int] | None = None,
        key: str | None = None,
    ) -> InferenceResult:
        """Return logits for images, which become part of the stream unless ``adapt`` is False.

        Args:
            x: The images.
            adapt: Whether to keep the images, and to update if an update is due.
            check: Called with the logits; nothing changes if it raises.
            resized_to: (height, width) of the images, if they were resized.
            key: What the client calls the request; one that has counted already is answered as before.
        """
        if key is not None and adapt and (known := self.keyed.find(key, x)) is not None:
            if check is not None:
                check(known.logits)
            return known
        batch, is_large_enough = self.window.make_batch(x), self.window.is_large_enough(x)
        reason = self._reason_not_to_update(x) if adapt else "adaptation was not requested"
        with self._unchanged_on_failure(changes_model=reason is None):
            if reason is None:
                with self.budget.spend():
                    logits: Tensor = self.model(batch).cpu()  # which waits until an accelerator is done
            else:
                logits = self.model.predict(batch) if is_large_enough else self._predict_source(x)
            logits = logits[-len(x) :].cpu()  # once, for all that is done with them
            if check is not None:
                check(logits)
            source_classes = None
            if adapt and logits.ndim == 2 and self.answers is not None:
                source_classes = self._predict_source(x).argmax(1)
            self._record_guard_events()
            if reason is None and self.monitor is not None and not self.monitor.health.adapted:
                reason = PAUSED
            self.used_at = time.time()
            if adapt:
                if reason == OVER_BUDGET:
                    self.num_over_budget += 1
                    self.record(StreamEvent.UPDATE_SKIPPED, OVER_BUDGET)
                self._remember(x, logits, updated=reason in (None, PAUSED))
                if resized_to is not None and self.options.image_size is None:
                    self._count_resized(resized_to)
        uses_source_statistics = not is_large_enough or (self.monitor is not None and self.monitor.is_sorted)
        fraction = 0.0 if uses_source_statistics else batch_fraction(self.model.source, len(batch))
        ids, why = None, reason if adapt else None
        if source_classes is not None:
            by_source = not is_large_enough or (self.monitor is not None and self.monitor.health.answered_by_source)
            ids = self._accuracy.add_(logits.argmax(1), source_classes, by_source=by_source)
        result = InferenceResult(logits, self.num_updates, reason is None, fraction, why, resized_to, ids)
        if key is not None and adapt:
            self.keyed.add(key, x, result)
        return result

    @property
    def _accuracy(self) -> AccuracyTracker:
        """The answers of the stream, which may be more than the guard gave, with the guard's estimate."""
        return AccuracyTracker(self.answers, None if self.monitor is None else self.monitor.accuracy.gain_monitor)

    def _count_resized(self, size: tuple[int, int]) -> None:
        self.num_resized += 1
        if self.num_resized == 1:
            height, width = size
            cause = f"images of several sizes are resized to that of the first, {height}x{width}"
            self.record(StreamEvent.RESIZED, cause)
            logger.warning("stream %s: %s; give --size to choose another", self.name, cause)

    @torch.no_grad()
    def _predict_source(self, x: Tensor) -> Tensor:
        try:
            with self.model.autocast():
                logits: Tensor = self.source_network(x)
        except RuntimeError as error:
            annotate_network_error(error, x)
            raise
        return logits.to(x)

    def _reason_not_to_update(self, x: Tensor) -> str | None:
        if self.model.frozen:
            return "the stream is frozen"
        if not self.window.is_large_enough(x):
            return "the stream has too few images yet, so the source network answered"
        if not self.window.is_update_due(len(x)):
            return "no update is due yet"
        return OVER_BUDGET if self.budget.is_exhausted else None

    def _remember(self, x: Tensor, logits: Tensor, *, updated: bool) -> None:
        mean = float(confidence(logits).mean())
        self.confidences.append(round(mean, 4) if mean == mean else None)
        self.collapse_scores.append(self._collapse_score)
        self.window.push(x, updated=updated)
        if self.options.keep_images:
            self.last_image = x[-1].mul(255).round().byte()
        if self.image_size is None:
            self.image_size = (x.shape[2], x.shape[3])
        self.num_requests += 1
        self.num_images += len(x)
        self.num_changes += 1

    @contextmanager
    def _unchanged_on_failure(self, *, changes_model: bool) -> Iterator[None]:
        """Restore the stream if the block raises; only what a guard says about rejected input stays on record.

        A step may fail after the weights or the optimizer have changed, so an update keeps what it may change of the
        model. Predictions do not change it.
        """
        model = self.model
        before = {name: copy.copy(getattr(self, name)) for name in RECORDS}
        try:
            with restore_on_error(model) if changes_model else nullcontext():
                try:
                    yield
                except InputError:
                    self._record_guard_events()
                    raise
        except BaseException as error:
            if not isinstance(error, InputError):
                vars(self).update(before)
            self._replace_model(model)
            raise

    # ---- operation ----

    def act(self, action: str) -> None:
        """Do what an operator requests: one of :data:`ACTIONS`."""
        with self._unchanged_on_failure(changes_model=True):
            ACTIONS[action](self)
            if not self._record_guard_events():
                self.record(action, "requested")

    def feedback(
        self, ids: Sequence[int], labels: Sequence[int] | None, right: Sequence[bool] | None
    ) -> tuple[FeedbackSummary, int]:
        """Take labels for some of the last answers, or whether they are right; on harm, do what ``on_harm`` says.

        Returns:
            What the labels say, and how many ids are unknown.
        """
        if self.answers is None:
            raise ApiError(409, "the service remembers no answers: start it with --feedback 1000, for example")
        summary, num_unknown = self._accuracy.set_labels_(ids, labels, right=right)
        if summary.is_harmful:
            self.record(EventKind.HARM, str(summary))
            if self.options.on_harm is not None:
                self.act(self.options.on_harm)
                self.answers.forget_labels_()
        self.num_changes += 1
        return summary, num_unknown

    def load(self, model: AdaptiveModel) -> None:
        """Continue with another model; the window, which is not part of a saved state, starts empty."""
        with self._unchanged_on_failure(changes_model=False):
            self._replace_model(model)
            self._forget_images()
            self.record(StreamEvent.LOAD, "a state was uploaded")
        self._forget_labels()

    def reset(self) -> None:
        """Start over, exactly as a new stream."""
        self.model.reset()
        self._forget_images()
        self._forget_labels()

    def roll_back(self) -> None:
        """Return to the last known-good snapshot of the guard."""
        if self.monitor is None:
            raise ApiError(409, "the stream has no guard, so there is no snapshot to return to: reset it instead")
        self.monitor.rollback()
        self._forget_labels()

    def _forget_labels(self) -> None:
        if self.answers is not None:  # they are about another state of the model
            self.answers.forget_labels_()

    def _forget_images(self) -> None:
        self.last_image = None
        self.window.clear()
        self.image_size, self.num_resized = None, 0

    # ---- history ----

    @property
    def num_updates(self) -> int:
        """Number of updates of the method since the stream was new or reset."""
        return self.model.unwrapped.num_steps

    def record(self, kind: str, cause: str, **details: Any) -> None:
        """Write an event to the audit log and to the stream's history."""
        self.num_changes += 1
        event = self.log.append(self.name, kind, cause, step=self.model.num_steps, **details)
        self.events.append({key: event[key] for key in ("time", "kind", "cause", "step")})

    def _record_guard_events(self) -> bool:
        """Record the guard's events since the last call, and return whether there were any."""
        events = self._guard_events
        known = [number for number, event in enumerate(events) if event is self._last_guard_event]
        new = events[known[0] + 1 :] if known else events
        for event in new:
            self.record(event.kind, event.cause, signals=event.signals)
            if event.kind in STATE_CHANGES or event.kind == EventKind.HARM:  # which the guard's own estimate showed
                self._forget_labels()
        self._last_guard_event = events[-1] if events else None
        return bool(new)

    @property
    def _guard_events(self) -> list[Event]:
        return [] if self.monitor is None else self.monitor.events

    @property
    def _collapse_score(self) -> float | None:
        """The collapse score of a guard, from 1 on an alarm; None without a guard."""
        return None if self.monitor is None else round(self.monitor.collapse_score, 4)

    def _replace_model(self, model: AdaptiveModel) -> None:
        # Once for each model: whether an object has the attributes of a protocol takes long to find out.
        self.model, self.monitor = model, model if isinstance(model, Monitored) else None
        self._last_guard_event = next(reversed(self._guard_events), None)

    def summary(self) -> dict[str, Any]:
        """Return counts, health and history, as ``GET /streams`` shows them."""
        return {
            "name": self.name,
            "frozen": self.model.frozen,
            "updates": self.num_updates,
            "requests": self.num_requests,
            "images": self.num_images,
            "image_size": self.image_size,
            "resized": self.num_resized,
            "skipped": {"not_finite": self.model.num_skipped, "budget": self.num_over_budget},
            "used_at": round(self.used_at, 3),
            "collapse_score": self._collapse_score,
            "last_image": self.last_image is not None,
            "feedback": None if self.answers is None else self.answers.summarize().as_dict(),
            "health": {} if self.monitor is None else self.monitor.health.as_dict(),
            "confidences": list(self.confidences),
            "collapse_scores": list(self.collapse_scores),
            "events": list(self.events),
        }

    def restore(self, summary: dict[str, Any]) -> None:
        """Take over the counts and the history of a :meth:`summary`."""
        self.num_requests, self.num_images = int(summary["requests"]), int(summary["images"])
        if self.answers is not None:  # ids of before are not given again, also if the answers were not saved
            self.answers = AnswerLog(self.options.num_answers, first_id=self.num_images)
        self.num_over_budget, self.used_at = int(summary["skipped"]["budget"]), float(summary["used_at"])
        if (size := summary["image_size"]) is not None:
            self.image_size = (int(size[0]), int(size[1]))
        self.num_resized = int(summary["resized"])
        self.confidences.extend(summary["confidences"])
        self.collapse_scores.extend(summary["collapse_scores"])
        self.events.extend(summary["events"])


ACTIONS: dict[str, Callable[[ServedStream], object]] = {
    StreamEvent.RESET: ServedStream.reset,
    StreamEvent.FREEZE: lambda stream: stream.model.freeze(),
    StreamEvent.UNFREEZE: lambda stream: stream.model.unfreeze(),
    StreamEvent.ROLLBACK: ServedStream.roll_back,
}
