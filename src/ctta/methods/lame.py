"""LAME: correct the source's predictions so that similar images of a batch get similar labels."""

from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import current_reducer, read
from ctta.core.validation import check_choice, check_integer
from ctta.functional import at_least_float32
from ctta.methods.parts.prediction import SourceModel
from ctta.nn.heads import features_and_logits

MAX_RELATIVE_CHANGE = 1e-8  # of the energy, at which the iteration stops
FIRST_ITERATIONS = 16  # before the host reads their energies; then twice as many as have been made


class LAME(SourceModel):
    """Smooth the source's predictions over the neighbors of each image in feature space; nothing is learned.

    It helps where a batch has few classes, as in class-sorted or strongly correlated streams, and does great harm in
    shuffled ones. Returns log-probabilities.

    Args:
        net: A network for images, whose classifier can be found or is named by ``head``.
        affinity: The similarity of two images: ``"rbf"`` is a Gaussian of the distance of their normalized features,
            ``"knn"`` is 1 for the nearest neighbors.
        num_neighbors: The neighbor whose mean distance is the width of the Gaussian, the image itself being the first;
            or the number of neighbors of ``"knn"``, without the image itself.
        max_iterations: Limit of the iterations per batch.
        head: The name of the classifier; by default it is found.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> LAME(net)(torch.randn(16, 4)).exp().sum(1).allclose(torch.ones(16))
    True

    Reference: Boudiaf et al., "Parameter-free online test-time adaptation", CVPR 2022.
    """

    info = MethodInfo("LAME", paper="Boudiaf et al., CVPR 2022", labels_pixels=False)

    def __init__(
        self,
        net: nn.Module,
        *,
        affinity: Literal["rbf", "knn"] = "rbf",
        num_neighbors: int = 5,
        max_iterations: int = 100,
        head: str | None = None,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=0, **common)
        check_choice("affinity", affinity, ("rbf", "knn"))
        self.affinity = affinity
        self.num_neighbors = check_integer("num_neighbors", num_neighbors, 1)
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        self.head = self.use_head(head)

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        features, logits = features_and_logits(self.source, x)
        self.require_image_logits(logits)
        batch = current_reducer()
        features, logits = batch.gather(at_least_float32(features)), batch.gather(at_least_float32(logits))
        return batch.local(self._smooth(self._compare(F.normalize(features)), logits.softmax(1)))

    def _compare(self, features: Tensor) -> Tensor:
        """Return the affinities (N, N) of normalized features."""
        distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        num_neighbors = min(self.num_neighbors, len(features))
        if self.affinity == "rbf":
            width = distances.kthvalue(num_neighbors, dim=1).values.mean()
            # Identical images have a width of 0, and are all alike.
            return (-(distances**2) / (2 * width**2).clamp_min(torch.finfo(width.dtype).tiny)).exp()
        distances.fill_diagonal_(torch.inf)
        nearest = distances.topk(min(self.num_neighbors, max(len(features) - 1, 1)), largest=False).indices
        return torch.zeros_like(distances).scatter_(1, nearest, 1.0).fill_diagonal_(0)

    def _smooth(self, affinity: Tensor, probabilities: Tensor) -> Tensor:
        """Return the log-probabilities that minimize LAME's objective, by bound optimization."""
        unary = (probabilities + 1e-10).log()
        log_labels, energies = unary.log_softmax(1), [torch.inf]
        while (num_done := len(energies) - 1) < self.max_iterations:
            # An accelerator stalls when the host reads an energy, so more iterations are made than may be needed.
            results, latest = [], []
            for _ in range(min(max(2 * num_done, FIRST_ITERATIONS), self.max_iterations - num_done)):
                pairwise = affinity @ log_labels.exp()
                log_labels = (unary + pairwise).log_softmax(1)
                labels = log_labels.exp()
                results.append(log_labels)
                latest.append((labels * (log_labels - unary - pairwise)).sum())
            for result, energy in zip(results, read(torch.stack(latest))[0].tolist(), strict=True):
                previous = energies[-1]
                energies.append(energy)
                if len(energies) > 3 and abs(energy - previous) <= MAX_RELATIVE_CHANGE * abs(previous):
                    return result
        return log_labels
