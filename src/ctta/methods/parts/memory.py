"""Memories of past images, balanced over the predicted classes, and the methods that learn from one.

A memory is a fixed number of slots. It decides which slot, if any, an arriving image takes; every image has the class
and the uncertainty that the method predicted when it arrived. On several processes all of them hold the same memory
and compute the same updates.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_reducer, read, replicated
from ctta.core.state import LazyModule, snapshot_buffers
from ctta.core.validation import check_fraction, check_integer
from ctta.errors import InputError
from ctta.functional import at_least_float32, confidence

EMPTY = -1  # the class of a slot without an image


@dataclass
class Slots:
    """What a memory knows of its slots, as plain numbers.

    Attributes:
        labels: The predicted class of each slot's image; :data:`EMPTY` for none.
        arrivals: The number of images before it.
        uncertainties: The entropy of its prediction.
        now: The number of images before the one that arrives.
        num_classes: The number of classes.
    """

    labels: list[int]
    arrivals: list[int]
    uncertainties: list[float]
    now: int
    num_classes: int

    def __post_init__(self) -> None:
        # Kept up to date by put_, since looking through all slots for every image would take long.
        self._empty = [slot for slot, label in enumerate(self.labels) if label == EMPTY]
        self._by_class: dict[int, list[int]] = defaultdict(list)
        for slot in sorted(range(len(self.labels)), key=self.arrivals.__getitem__):
            if self.labels[slot] != EMPTY:
                self._by_class[self.labels[slot]].append(slot)

    @property
    def first_empty(self) -> int | None:
        """The first slot without an image; None if all are taken."""
        return self._empty[0] if self._empty else None

    @property
    def largest_classes(self) -> list[int]:
        """The classes with the most images, in ascending order; all slots are taken."""
        largest = max(len(slots) for slots in self._by_class.values())
        return sorted(label for label, slots in self._by_class.items() if len(slots) == largest)

    def of_class(self, label: int) -> list[int]:
        """Return the slots with images of a class, in the order in which these arrived."""
        return self._by_class[label]

    def put_(self, slot: int, label: int, uncertainty: float) -> None:
        """Let the image that arrives take a slot, empty or not."""
        if self.labels[slot] == EMPTY:
            self._empty.remove(slot)
        else:
            self._by_class[self.labels[slot]].remove(slot)
        self._by_class[label].append(slot)
        self.labels[slot], self.arrivals[slot], self.uncertainties[slot] = label, self.now, uncertainty


@dataclass
class Arrivals:
    """What a memory has to know of the predictions of a batch.

    Attributes:
        labels: The predicted class of every image (N).
        uncertainties: The entropies of the predictions (N).
        is_accepted: Which images may be kept at all (N).
        num_classes: The number of classes.
    """

    labels: Tensor
    uncertainties: Tensor
    is_accepted: Tensor
    num_classes: int


class Memory(LazyModule, ABC):
    """A fixed number of slots for images; the subclasses say which of them an arriving image takes.

    The images are where the network is. The rest is on the host, which chooses the slots.
    """

    cpu_buffers: tuple[str, ...] = ("uncertainties", "labels", "arrivals", "num_seen")
    images: Tensor
    uncertainties: Tensor
    labels: Tensor
    arrivals: Tensor
    num_seen: Tensor

    @torch.inference_mode(False)
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = check_integer("memory_size", capacity, 1)
        self.register_lazy_buffer("images", capacity, ...)
        self.register_lazy_buffer("uncertainties", capacity)
        self.register_buffer("labels", torch.full((capacity,), EMPTY))
        self.register_buffer("arrivals", torch.zeros(capacity, dtype=torch.long))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.long))

    @abstractmethod
    def choose_slot(self, slots: Slots, label: int, uncertainty: float, generator: torch.Generator) -> int | None:
        """Return the slot that an arriving image takes; None to drop it."""

    def accept(self, logits: Tensor) -> Tensor:
        """Return which images of a batch may be kept at all (N), by their predictions (N, C, ...)."""
        return logits.new_ones(len(logits), dtype=torch.bool)

    @torch.no_grad()
    def read_predictions(self, parts: Sequence[Tensor], *others: Tensor) -> tuple[list[Arrivals], list[Tensor]]:
        """Read the predictions (N, C, ...) of parts of a batch, and other tensors, on the host in one transfer."""
        facts = [(predicted_classes(part), prediction_uncertainty(part), self.accept(part)) for part in parts]
        found = iter(read(*(fact for each in facts for fact in each), *others))
        return [Arrivals(next(found), next(found), next(found), part.shape[1]) for part in parts], list(found)

    @torch.no_grad()
    def add_(self, images: Tensor, arrivals: Arrivals, generator: torch.Generator) -> None:
        """Take in a batch (N, ...), image by image."""
        uncertainties = arrivals.uncertainties
        if not self.is_allocated:
            self.allocate_("images", images.new_zeros(self.capacity, *images.shape[1:]))
            self.allocate_("uncertainties", uncertainties.new_zeros(self.capacity))
        taken: dict[int, int] = {}
        slots = Slots(
            self.labels.tolist(),
            self.arrivals.tolist(),
            self.uncertainties.tolist(),
            int(self.num_seen),
            arrivals.num_classes,
        )
        rows = zip(arrivals.labels.tolist(), uncertainties.tolist(), arrivals.is_accepted.tolist(), strict=True)
        for row, (label, uncertainty, is_accepted) in enumerate(rows):
            slot = self.choose_slot(slots, label, uncertainty, generator) if is_accepted else None
            if slot is not None:
                taken[slot] = row
                slots.put_(slot, label, uncertainty)
            slots.now += 1
        self.num_seen.fill_(slots.now)
        if taken:
            at, of = places = torch.tensor([[*taken], [*taken.values()]])
            self.uncertainties[at] = uncertainties[of].to(self.uncertainties.dtype)
            at, of = places.to(images.device)
            self.images[at] = images[of].to(self.images.dtype)
            self.labels.copy_(torch.tensor(slots.labels))
            self.arrivals.copy_(torch.tensor(slots.arrivals))

    @torch.no_grad()
    def forget_since_(self, num_seen: int) -> None:
        """Drop the images that arrived after the first ``num_seen``; what they have replaced does not return."""
        is_recent = (self.labels != EMPTY) & (self.arrivals >= num_seen)
        self.labels.masked_fill_(is_recent, EMPTY)
        self.arrivals.masked_fill_(is_recent, 0)
        self.num_seen.fill_(num_seen)

    def recall(self) -> tuple[Tensor, Tensor]:
        """Return the images, class by class and oldest first, and their ages: how many have arrived since each.

        The ages are on the host.
        """
        labels, arrivals = self.labels.tolist(), self.arrivals.tolist()
        order = sorted(range(self.capacity), key=lambda slot: (labels[slot], arrivals[slot]))
        found = torch.tensor([slot for slot in order if labels[slot] != EMPTY], dtype=torch.long)
        return self.images[found.to(self.images.device)], self.num_seen - self.arrivals[found]

    @override
    def extra_repr(self) -> str:
        return str(self.capacity)


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class of every image (N); for dense logits the one of the largest mean probability."""
    return (logits if logits.ndim == 2 else at_least_float32(logits).softmax(1).flatten(2).mean(2)).argmax(1)


def prediction_uncertainty(logits: Tensor) -> Tensor:
    """Return the entropy of every image's prediction (N), as RoTTA computes it; for dense logits the mean over pixels.

    A prediction that is not finite has the largest entropy, ln C.
    """
    p = at_least_float32(logits).softmax(1)
    entropies = -(p * (p + 1e-6).log()).sum(1).reshape(len(p), -1).mean(1)
    return entropies.nan_to_num(nan=math.log(logits.shape[1]))


def draw_below(bound: int, generator: torch.Generator) -> int:
    """Return a random integer from 0 to ``bound`` - 1."""
    return int(torch.randint(bound, (), generator=generator))


class TimelyMemory(Memory):
    """RoTTA's memory (CSTU): each class has an equal share, and old and uncertain images go first."""

    @override
    def choose_slot(self, slots: Slots, label: int, uncertainty: float, generator: torch.Generator) -> int | None:
        own = slots.of_class(label)
        if len(own) >= self.capacity / slots.num_classes:
            candidates = own
        elif (empty := slots.first_empty) is not None:
            return empty
        else:  # class by class, since the last of equals goes
            candidates = [slot for each in slots.largest_classes for slot in slots.of_class(each)]
        scores = [
            self._score(slots.now - slots.arrivals[slot], slots.uncertainties[slot], slots.num_classes)
            for slot in candidates
        ]
        worst = max(range(len(scores)), key=lambda index: (scores[index], index))
        return candidates[worst] if scores[worst] > self._score(0, uncertainty, slots.num_classes) else None

    def _score(self, age: int, uncertainty: float, num_classes: int) -> float:
        timeliness = 1 / (1 + math.exp(-age / self.capacity))
        return timeliness + uncertainty / math.log(max(num_classes, 2))


class ReservoirMemory(Memory):
    """NOTE's memory (PBRS): a reservoir per predicted class, so that every image of a class is kept equally often."""

    cpu_buffers = (*Memory.cpu_buffers, "num_seen_by_class")
    num_seen_by_class: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.register_lazy_buffer("num_seen_by_class", None, dtype=torch.long)

    @override
    def add_(self, images: Tensor, arrivals: Arrivals, generator: torch.Generator) -> None:
        if not self.is_allocated:
            self.allocate_("num_seen_by_class", torch.zeros(arrivals.num_classes, dtype=torch.long))
        super().add_(images, arrivals, generator)

    @override
    def choose_slot(self, slots: Slots, label: int, uncertainty: float, generator: torch.Generator) -> int | None:
        self.num_seen_by_class[label] += 1
        if (empty := slots.first_empty) is not None:
            return empty
        largest, own = slots.largest_classes, slots.of_class(label)
        if label not in largest:
            own = slots.of_class(largest[draw_below(len(largest), generator)])
        elif torch.rand((), generator=generator, dtype=torch.float64) > len(own) / int(self.num_seen_by_class[label]):
            return None
        return own[draw_below(len(own), generator)]


class LatestMemory(Memory):
    """The latest images, of whatever classes: the memory of NOTE for streams that are not sorted by class."""

    @override
    def choose_slot(self, slots: Slots, label: int, uncertainty: float, generator: torch.Generator) -> int | None:
        empty = slots.first_empty
        return slots.arrivals.index(min(slots.arrivals)) if empty is None else empty


class ConfidentMemory(Memory):
    """SoTTA's memory (HUS): only images of confident predictions, uniform over the predicted classes."""

    def __init__(self, capacity: int, min_confidence: float) -> None:
        super().__init__(capacity)
        check_fraction("min_confidence", min_confidence)
        self.min_confidence = min_confidence

    @override
    def accept(self, logits: Tensor) -> Tensor:
        # Not >=, so that a prediction of NaN reaches the loss, which skips the step.
        return ~(confidence(logits).reshape(len(logits), -1).mean(1) < self.min_confidence)

    @override
    def choose_slot(self, slots: Slots, label: int, uncertainty: float, generator: torch.Generator) -> int | None:
        if (empty := slots.first_empty) is not None:
            return empty
        largest = slots.largest_classes
        if label not in largest:
            label = largest[draw_below(len(largest), generator)]
        own = slots.of_class(label)
        return own[draw_below(len(own), generator)]


class MemoryModel(AdaptiveModel):
    """A method that predicts, remembers the images, and learns from its memory at regular intervals.

    A subclass sets ``memory`` and ``update_every``, and implements :meth:`update`. The student predicts the whole batch
    before it is remembered. An update is due whenever another ``update_every`` images have arrived, also within a
    batch; then only the images up to there are in the memory.
    """

    check_settings: ClassVar = {"memory_size": 8, "update_every": 6}  # the memory of the contract suite has to evict
    checks_values_late = True
    memory: Memory
    student: nn.Module
    #: The number of images between two updates.
    update_every: int

    def update(self, number: int) -> bool:
        """Learn from the memory, and return whether to keep what it did to buffers.

        If not, because the step was skipped, norm statistics return to what they were, and the memory drops the images
        since the last update. ``number`` counts the updates of a step, and distinguishes their random draws.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither update() nor an adapt_step() of its own")

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits = self.predict_step(x)
        batch, generator = current_reducer(), self.generator("memory")
        images, predictions = batch.gather(x), batch.gather(logits.detach())
        num_new = int(self.memory.num_seen) % self.update_every
        first = min(self.update_every - num_new, len(images))  # the images up to the next update
        rest = len(images) - first
        sizes = [first, *(min(self.update_every, rest - done) for done in range(0, rest, self.update_every))]
        with replicated():
            found, _ = self.memory.read_predictions(predictions.split(sizes))
            for number, (part, arrivals) in enumerate(zip(images.split(sizes), found, strict=True)):
                if num_new + len(part) == self.update_every:
                    self.remember_and_update_(part, arrivals, generator, partial(self.update, number), num_new)
                else:
                    self.memory.add_(part, arrivals, generator)
                num_new = 0
        return logits

    def remember_and_update_(
        self,
        images: Tensor,
        arrivals: Arrivals,
        generator: torch.Generator,
        update: Callable[[], bool],
        num_new: int = 0,
    ) -> None:
        """Take images into the memory and call ``update``, which says whether to keep what it did to buffers.

        ``num_new`` is the number of images in the memory since the last update.
        """
        last_update = int(self.memory.num_seen) - num_new
        restore_buffers = snapshot_buffers(*(module for name, module in self.named_children() if name != "source"))
        self.memory.add_(images, arrivals, generator)
        if not update():
            restore_buffers()
            self.memory.forget_since_(last_update)  # also those of earlier batches, or it would fail again

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        expected = self.memory.images.shape[1:]
        if self.memory.is_allocated and x.shape[1:] != expected:
            raise InputError(
                f"the memory holds inputs of shape {tuple(expected)}, and this batch has {tuple(x.shape[1:])}: give "
                "all images of a stream the same size"
            )
