"""What a stream reveals without labels: domains, repeated labels, what images are worth, what mirrors keep.

Each is a state, and a function that returns the state after a batch; :class:`StateBuffers` saves one with the model.
"""

import math
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.state import CpuState
from ctta.functional import at_least_float32, confidence
from ctta.methods.vane.constants import (
    DOMAIN_MEMORY,
    FIRST_CLASS_COUNT,
    FIRST_MIRROR_COUNT,
    MIN_MIRROR_AGREEMENT,
    MIN_MIRROR_CONFIDENCE,
    MIN_VARIANCE,
    MIRROR_MEMORY,
    PRIOR_MOVES,
    PRIOR_STAYS,
    RECENT_MEMORY,
    SMOOTHING,
    TEMPERATURE,
    TINY_VARIANCE,
    TRANSITION_MEMORY,
)

Array = NDArray[np.float64]


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.float64, device="cpu")


def _full(count: int, value: float) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64, device="cpu")


class DomainState(NamedTuple):
    """The appearance of the current domain; its tensors are empty before the first batch.

    Attributes:
        mean: The mean of the features of :func:`measure_appearance` (F).
        square: The mean of their squares (F).
        recent: Their mean over recent images (F).
        counts: The number of images of the domain, with a decay over :data:`DOMAIN_MEMORY`, and of recent ones.
    """

    mean: Tensor
    square: Tensor
    recent: Tensor
    counts: Tensor

    @classmethod
    def initial(cls) -> "DomainState":
        """Return the state before the first batch."""
        return cls(_empty(), _empty(), _empty(), _full(2, 0.0))

    @property
    def num_images(self) -> float:
        """The number of images of the current domain so far, with their decay."""
        return float(self.counts[0])


@torch.no_grad()
def update_domain(state: DomainState, features: Tensor, max_distance: float | None) -> tuple[DomainState, bool]:
    """Detect when a stream turns from one domain to another, such as from fog to noise.

    Track the mean and variance of the brightness, contrast and sharpness of images over the current domain. The domain
    ends when the mean over recent images is too far from its own. A stream of mixed domains has a large variance, so it
    counts as one domain.

    Args:
        state: The state before the batch.
        features: The result of :func:`measure_appearance` for the whole batch, on the CPU.
        max_distance: The mean squared distance, in variances of single images, up to which a domain goes on; None if
            it never ends. It must allow for batches of one class.

    Returns:
        The state after the batch, and whether the batch begins a new domain.
    """
    features = features.double()
    if not features.isfinite().all():
        return state, False
    mean, square, num_new = features.mean(0), features.square().mean(0), len(features)
    first = DomainState(mean, square, mean.clone(), _full(2, float(num_new)))
    if not state.mean.numel():
        return first, False
    if len(mean) != len(state.mean):  # for example gray images after color
        return first, max_distance is not None
    num_old, num_recent = state.counts.tolist()
    kept_recent = math.exp(-num_new / RECENT_MEMORY) * num_recent
    recent = state.recent.lerp(mean, num_new / (kept_recent + num_new))
    state = state._replace(recent=recent)
    if max_distance is not None and num_old >= RECENT_MEMORY and _measure_distance(state) > max_distance:
        return first, True
    kept = math.exp(-num_new / DOMAIN_MEMORY) * num_old
    share = num_new / (kept + num_new)
    counts = torch.tensor([kept + num_new, kept_recent + num_new], dtype=torch.float64, device="cpu")
    return DomainState(state.mean.lerp(mean, share), state.square.lerp(square, share), recent, counts), False


def _measure_distance(state: DomainState) -> float:
    brightness, contrast, _ = state.mean.chunk(3)
    floor = MIN_VARIANCE * torch.cat([contrast.exp(), torch.ones_like(brightness).repeat(2)])
    variance = (state.square - state.mean.square()).clamp_min(floor)
    return float(((state.recent - state.mean).square() / variance).mean())


@torch.no_grad()
def measure_appearance(x: Tensor) -> Tensor:
    """Return the brightness, contrast and sharpness of each channel of each image.

    They are means, then logarithms of variances, then of squared differences between neighbors (N, 3C). Inputs that are
    no images count as one row of pixels.
    """
    x = at_least_float32(x)
    pixels = x if x.ndim == 4 else x.reshape(len(x), 1, 1, -1)
    variance = pixels.var((2, 3), correction=0)
    steps = [pixels.diff(dim=axis).square().mean((2, 3)) for axis in (2, 3) if pixels.shape[axis] > 1]
    sharpness = sum(steps, torch.zeros_like(variance))
    return torch.cat([pixels.mean((2, 3)), (variance + TINY_VARIANCE).log(), (sharpness + TINY_VARIANCE).log()], 1)


class ChainState(NamedTuple):
    """What is known about the labels of a stream; ``message`` and ``class_counts`` are empty before the first batch.

    Attributes:
        message: The label distribution of the last image (C); zeros before the first image.
        class_counts: How often each class was predicted (C), with a decay.
        transitions: How many labels stayed, of how many, with a decay.
    """

    message: Tensor
    class_counts: Tensor
    transitions: Tensor

    @classmethod
    def initial(cls) -> "ChainState":
        """Return the state before the first batch."""
        return cls(_empty(), _empty(), _full(2, 0.0))

    @property
    def is_started(self) -> bool:
        """Whether there was a batch."""
        return self.message.numel() > 0

    @property
    def stickiness(self) -> float:
        """The estimated probability that a label repeats for another reason than chance."""
        return _estimate_stickiness(*self.transitions.tolist())

    @property
    def frequencies(self) -> Tensor:
        """The class frequencies pi of recent predictions (C); there are none before the first batch."""
        counts = self.class_counts
        return (1 - SMOOTHING) * counts / counts.sum() + SMOOTHING / len(counts)

    @property
    def one_class_prevails(self) -> bool:
        """Whether a class is a third of the way from its even share to all images, so that diversity would be wrong."""
        frequencies = self.frequencies
        return bool(frequencies.max() > (1 + 2 / len(frequencies)) / 3)


@torch.no_grad()
def update_chain(
    state: ChainState,
    logits: Tensor,
    class_memory: float,
    *,
    uninformative: float = 0.0,
    is_new_domain: bool = False,
) -> tuple[ChainState, Tensor]:
    """Learn from the predictions of a batch how much labels repeat, and correct the predictions for it.

    The labels of consecutive images are a hidden Markov chain. With probability ``stickiness`` an image has the label
    of the one before, else one drawn from the class frequencies pi of the stream: P(j | i) = s [i = j] + (1 - s) pi_j.
    A prediction p_t(j) counts as evidence (1 - u) p_t(j) / pi_j + u, so that with s = 0 the posterior follows the
    prediction itself, however biased the network is; only what repeats from image to image more often than pi explains
    moves s away from zero. The stickiness is learned online by expectation maximization, from the forward-backward
    posteriors of each batch.

    Args:
        state: The state before the batch.
        logits: The predictions (N, C) on the CPU, in the order of the stream.
        class_memory: How many predictions the class frequencies remember within a domain. Longer runs of a class look
            like a class that the network prefers.
        uninformative: U, the probability that a prediction has nothing to do with its image. It limits what one
            confident error can outweigh, so that a network that is often wrong still shows labels that repeat.
        is_new_domain: Whether the batch begins a domain, in which the network may prefer other classes.

    Returns:
        The state after the batch, and the logarithms of the posteriors (N, C).
    """
    tempered = (logits.double() / TEMPERATURE).softmax(1).nan_to_num(1 / logits.shape[1])
    before = state.message if state.is_started else torch.zeros_like(tempered[0])
    counts = state.class_counts
    if is_new_domain or not state.is_started:
        counts = torch.full_like(tempered[0], FIRST_CLASS_COUNT / tempered.shape[1])
    # First, since a network that prefers a class in a new domain must not look like labels that repeat.
    counts = counts.mul(np.exp(-len(tempered) / class_memory)).add_(tempered.sum(0))
    state = state._replace(class_counts=counts)
    pi = state.frequencies.numpy()
    p = (1 - uninformative) * tempered.numpy() + uninformative * pi
    kept = np.exp(-len(p) / TRANSITION_MEMORY)
    old_stays, old_transitions = state.transitions.tolist()
    num_transitions, stickiness = kept * old_transitions + len(p), state.stickiness
    for _ in range(2):  # the second time with what the batch itself says
        forward = _pass_forward(p, pi, before.numpy(), stickiness)
        posterior, new_stays = _pass_backward(p, pi, before.numpy(), forward, stickiness)
        num_stays = kept * old_stays + new_stays
        stickiness = _estimate_stickiness(num_stays, num_transitions)
    transitions = torch.tensor([num_stays, num_transitions], dtype=torch.float64, device="cpu")
    corrected = torch.from_numpy(posterior).clamp_min(torch.finfo(torch.float32).tiny).log().to(logits)
    return ChainState(torch.from_numpy(forward[-1].copy()), counts, transitions), corrected


def _estimate_stickiness(num_stays: float, num_transitions: float) -> float:
    return (num_stays + PRIOR_STAYS) / (num_transitions + PRIOR_STAYS + PRIOR_MOVES)


def _pass_forward(p: Array, pi: Array, before: Array, stickiness: float) -> Array:
    """Return the label distribution of each image given the images up to it (N, C)."""
    messages = np.empty_like(p)
    scale = stickiness / pi
    for number, evidence in enumerate(p):
        # All zero before the first image, which then has its prediction.
        message = evidence * (scale * before + (1 - stickiness))
        before = messages[number] = message / message.sum()
    return messages


def _pass_backward(p: Array, pi: Array, before: Array, forward: Array, stickiness: float) -> tuple[Array, float]:
    """Return the label distribution of each image given all images, and the expected number of labels that stayed."""
    posterior, later, num_stays = np.empty_like(p), np.ones_like(pi), 0.0
    scale = stickiness / pi
    for number in reversed(range(len(p))):
        product = forward[number] * later
        posterior[number] = product / product.sum()
        evidence = p[number] * later
        stayed, moved = scale * evidence, (1 - stickiness) * evidence.sum()
        weight = (stayed * (forward[number - 1] if number else before)).sum()
        num_stays += weight / (weight + moved)
        later = stayed + moved
        later /= later.mean()
    return posterior, num_stays


class MirrorState(NamedTuple):
    """How often confident predictions agree with those for mirrored images.

    Most photographs keep their class in a mirror. Digits, letters and many signs do not: a network is as sure of
    another class, and an average over both predictions is worse than either.

    Attributes:
        counts: How many agreed, of how many confident predictions, with a decay.
    """

    counts: Tensor

    @classmethod
    def initial(cls) -> "MirrorState":
        """Return the state before the first batch."""
        return cls(_full(2, float(FIRST_MIRROR_COUNT)))

    @property
    def keeps_classes(self) -> bool:
        """Whether mirrored images seem to have the classes of the images."""
        agreed, total = self.counts.tolist()
        return bool(agreed >= MIN_MIRROR_AGREEMENT * total)


@torch.no_grad()
def update_mirrors(state: MirrorState, logits: Tensor, mirrored: Tensor) -> MirrorState:
    """Return the state after a batch, from predictions on the CPU for its images (N, C) and for the mirrored ones."""
    is_sure = confidence(logits) > MIN_MIRROR_CONFIDENCE
    agrees = is_sure & (logits.argmax(1) == mirrored.argmax(1))
    found = torch.stack([agrees.sum(), is_sure.sum()]).double()
    return MirrorState(state.counts.mul(math.exp(-float(found[1]) / MIRROR_MEMORY)).add_(found))


class SampleState(NamedTuple):
    """How much the statistics of recent images are worth.

    Attributes:
        size: The number of independently drawn images that would say as much, their effective sample size.
    """

    size: Tensor

    @classmethod
    def initial(cls) -> "SampleState":
        """Return the state before the first batch."""
        return cls(_full(1, 0.0))


def update_sample(
    state: SampleState, num_images: int, stickiness: float, horizon: float, *, is_new_domain: bool
) -> tuple[SampleState, float]:
    """Count a batch, which says less the more its labels repeat.

    Args:
        state: The state before the batch.
        num_images: The images of the batch.
        stickiness: How much labels repeat, see :attr:`ChainState.stickiness`.
        horizon: How many images are remembered; more, where images depend on each other.
        is_new_domain: Whether the batch begins a domain, for which earlier images do not count.

    Returns:
        The state after the batch, and the share of the batch in it.
    """
    size = num_images * (1 - stickiness) / (1 + stickiness)
    # Between forgetting by images, as domains change, and by independent ones, as classes must balance.
    kept = math.exp(-math.sqrt(num_images * size) / horizon) * float(state.size)
    total = size if is_new_domain else kept + size
    return SampleState(_full(1, total)), size / total


StateT = TypeVar("StateT", DomainState, ChainState, MirrorState, SampleState)


class StateBuffers(CpuState, Generic[StateT]):
    """Buffers that hold one of these states, so that it is saved, moved and reset with the model."""

    def __init__(self, initial: StateT) -> None:
        super().__init__()
        self._kind: type[StateT] = type(initial)
        for name, value in initial._asdict().items():
            if value.numel():
                self.register_buffer(name, value)
            else:
                self.register_lazy_buffer(name, None, dtype=value.dtype)

    @property
    def state(self) -> StateT:
        """The state."""
        state: StateT = self._kind(*(self.get_buffer(name) for name in self._kind._fields))
        return state

    @torch.no_grad()
    def store_(self, state: StateT) -> None:
        """Replace the state."""
        for name, value in state._asdict().items():
            if (buffer := self.get_buffer(name)).shape == value.shape:
                buffer.copy_(value)
            else:
                self.allocate_(name, value)
