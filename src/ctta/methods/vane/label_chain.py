"""How much the labels of a stream repeat, estimated without labels, and predictions corrected for it (VANE)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.state import HostModule

Array = NDArray[np.float64]

TRANSITION_MEMORY = 100  # how many transitions the estimate of the stickiness remembers
#: How many predictions, evenly over the classes, the class frequencies of a domain start from.
FIRST_COUNT = 100
#: Transitions that the estimate starts from: one that stays, and five that do not.
PRIOR_STAYS, PRIOR_MOVES = 1.0, 5.0
#: The fraction of the uniform distribution in the class frequencies, so that none is zero.
SMOOTHING = 0.1
#: Predictions under a shift are overconfident, so their logits are divided by this before they count as evidence.
TEMPERATURE = 2.0


class LabelChain(HostModule):
    """A Markov chain over the hidden labels of consecutive images.

    With probability ``stickiness`` an image has the label of the one before, else one drawn from the class frequencies
    pi of the stream: P(j | i) = s [i = j] + (1 - s) pi_j. A prediction p_t(j) counts as evidence
    (1 - doubt) p_t(j) / pi_j + doubt, so that with s = 0 the posterior follows the prediction itself, however biased
    the network is; only what repeats from image to image more often than pi explains moves s away from zero. The
    stickiness is learned online by expectation maximization, from the forward-backward posteriors of each batch.

    Args:
        class_memory: How many predictions the class frequencies remember within a domain. Runs of a class that are
            longer look like a class that the network prefers.
        doubt: The probability that a prediction has nothing to do with its image. It limits what one confident error
            can outweigh, so that a network that is often wrong still shows labels that repeat.
    """

    message: Tensor
    class_counts: Tensor
    transitions: Tensor

    def __init__(self, class_memory: float, *, doubt: float = 0.0) -> None:
        super().__init__()
        self.doubt, self.class_memory = doubt, class_memory
        self.register_lazy_buffer("message", None, dtype=torch.float64)  # zeros before the first image
        self.register_lazy_buffer("class_counts", None, dtype=torch.float64)
        # How many stayed, of how many.
        self.register_buffer("transitions", torch.zeros(2, dtype=torch.float64, device="cpu"))

    @property
    def stickiness(self) -> float:
        """The estimated probability that a label repeats for another reason than chance."""
        return _estimate(*self.transitions.tolist())

    @property
    def frequencies(self) -> Tensor:
        """The class frequencies pi of recent predictions (C); there are none before the first batch."""
        counts = self.class_counts
        return (1 - SMOOTHING) * counts / counts.sum() + SMOOTHING / len(counts)

    @torch.no_grad()
    def follow_(self, logits: Tensor, *, is_new_domain: bool = False) -> Tensor:
        """Learn from the predictions of a batch, in the order of the stream, and correct them.

        Args:
            logits: The predictions (N, C).
            is_new_domain: Whether the batch begins a domain, in which the network may prefer other classes.

        Returns:
            The logarithms of the posteriors (N, C).
        """
        tempered = (logits.cpu().double() / TEMPERATURE).softmax(1).nan_to_num(1 / logits.shape[1])
        if not self.is_allocated:
            self.allocate_("message", torch.zeros_like(tempered[0]))
            self.allocate_("class_counts", torch.zeros_like(tempered[0]))
            is_new_domain = True
        if is_new_domain:
            self.class_counts.fill_(FIRST_COUNT / tempered.shape[1])
        # First, since a network that prefers a class in a new domain must not look like labels that repeat.
        self.class_counts.mul_(np.exp(-len(tempered) / self.class_memory)).add_(tempered.sum(0))
        pi = self.frequencies.numpy()
        p = (1 - self.doubt) * tempered.numpy() + self.doubt * pi
        before = self.message.numpy()
        kept = np.exp(-len(p) / TRANSITION_MEMORY)
        old_stays, old_transitions = self.transitions.tolist()
        num_transitions, stickiness = kept * old_transitions + len(p), self.stickiness
        for _ in range(2):  # the second time with what the batch itself says
            forward = _pass_forward(p, pi, before, stickiness)
            posterior, new_stays = _pass_backward(p, pi, before, forward, stickiness)
            num_stays = kept * old_stays + new_stays
            stickiness = _estimate(num_stays, num_transitions)
        self.transitions.copy_(torch.tensor([num_stays, num_transitions]))
        self.message.copy_(torch.from_numpy(forward[-1]))
        return torch.from_numpy(posterior).clamp_min(torch.finfo(torch.float32).tiny).log().to(logits)


def _estimate(num_stays: float, num_transitions: float) -> float:
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
