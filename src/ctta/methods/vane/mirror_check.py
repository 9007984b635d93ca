"""Find out without labels whether mirrored images keep their class (VANE)."""

import math

import torch
from torch import Tensor

from ctta.core.state import HostModule
from ctta.functional import confidence

#: Predictions that are surer than this are compared. Others differ between views whatever the images show.
MIN_CONFIDENCE = 0.9
#: The fraction of them that mirrored images must agree with.
MIN_AGREEMENT = 0.75
#: How many predictions count, and how many that agree are assumed at the start.
MEMORY, FIRST_COUNT = 200, 20


class MirrorCheck(HostModule):
    """Compare the predictions for images with those for their mirror images.

    Most photographs keep their class in a mirror. Digits, letters and many signs do not: a network is as sure of
    another class, and an average over both predictions is worse than either.
    """

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # How many agreed, of how many sure predictions.
        self.register_buffer("counts", torch.full((2,), float(FIRST_COUNT), dtype=torch.float64, device="cpu"))

    @property
    def keeps_classes(self) -> bool:
        """Whether mirrored images seem to have the classes of the images."""
        agreed, total = self.counts.tolist()
        return bool(agreed >= MIN_AGREEMENT * total)

    @torch.no_grad()
    def follow_(self, logits: Tensor, mirrored: Tensor) -> None:
        """Compare the predictions of a batch.

        Args:
            logits: The predictions for the images (N, C).
            mirrored: The predictions for the mirrored images (N, C).
        """
        is_sure = confidence(logits) > MIN_CONFIDENCE
        agrees = is_sure & (logits.argmax(1) == mirrored.argmax(1))
        found = torch.stack([agrees.sum(), is_sure.sum()]).cpu().double()
        self.counts.mul_(math.exp(-float(found[1]) / MEMORY)).add_(found)
