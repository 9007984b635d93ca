"""FOA: search prompts for a vision transformer by forward passes alone, and shift its features back to the source's."""

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer, read
from ctta.core.updates import Step
from ctta.core.validation import check_non_negative
from ctta.functional import confidence, entropy
from ctta.methods.foa.evolution import EvolutionStrategy
from ctta.methods.foa.prompts import FeatureShift, PromptSite, draw_prompts
from ctta.nn import BatchStats
from ctta.nn.heads import get_head
from ctta.source_stats import SourceStats


class FOA(AdaptiveModel):
    """Try candidate prompts on each batch, return the predictions of the best, and learn from their ranking.

    Prompts are tokens after the class token. No weight changes, no gradient is needed. A single image teaches nothing.

    Args:
        net: A vision transformer with a class token, such as timm's, torchvision's or transformers' ViT.
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches)``; 32 images suffice.
        num_prompts: The number of prompts.
        population: The number of new candidates per batch; the best one so far is evaluated again beside them.
        sigma: The initial standard deviation of the candidates.
        discrepancy: The weight, beside the entropy, of the class tokens' distance to the source's; ImageNet-R has 0.2.
        shift: The part of the way that the features before the classifier are shifted toward the source's mean.
        decay: The fraction of itself that the mean of past features keeps.
        head: The name of the classifier; by default it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any.
        seed: The seed of the prompts.

    >>> import ctta
    >>> net, x = ctta.testing.networks.BlockViT(), torch.rand(32, 3, 16, 16)
    >>> logits = FOA(net, source_stats=ctta.source_stats(net, [x]))(torch.rand(4, 3, 16, 16))

    Reference: Niu et al., "Test-time model adaptation with only forward passes", ICML 2024.
    """

    info = MethodInfo(
        "FOA", "Niu et al., ICML 2024", "prompts", 28, needs_source_data=True, labels_pixels=False, needs_vit=True
    )
    checks_values_late = True
    check_settings: ClassVar = {"num_prompts": 1, "population": 3}
    prompts: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        num_prompts: int = 3,
        population: int = 27,
        sigma: float = 1.0,
        discrepancy: float = 0.4,
        shift: float = 1.0,
        decay: float = 0.9,
        head: str | None = None,
        batch_stats: BatchStats = "auto",
        seed: int = 0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, seed=seed, **common)
        check_non_negative("discrepancy", discrepancy)
        self.num_prompts, self.population, self.sigma, self.discrepancy = num_prompts, population, sigma, discrepancy
        self.shift, self.decay, self.head = shift, decay, self.use_head(head)
        self.site = PromptSite.find(self.source, self.head)
        self.use_source_stats(source_stats, *PromptSite.STATISTICS)
        self.feature_shift = FeatureShift(self.source_stats["feature_mean"], shift, decay)
        self.register_buffer("prompts", draw_prompts(self.source, num_prompts, self.generator("prompts")))
        self.search = EvolutionStrategy(self.prompts.numel(), population, sigma)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._try_candidates(x)[0]

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits, candidates, fitness, mean = self._try_candidates(x)
        if len(candidates) == 1:
            return logits
        if is_finite := bool(fitness.isfinite().all()):
            self.feature_shift.update_(mean)
            self.prompts.copy_(candidates[fitness.argmin()].view_as(self.prompts))
            self.search.update_(candidates, fitness, num_injected=1)
        self.num_skipped += not is_finite
        sure, fraction = current_reducer().mean(confidence(logits).mean()), self.batch_fraction(len(x))
        self.last_step = Step(fitness.min(), not is_finite, sure, batch_stats=fraction)
        return logits

    @torch.no_grad()
    def _try_candidates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the logits of the best candidate, the candidates (k, n), their fitness (k), and mean features (d)."""
        batch, candidates, found = current_reducer(), self.prompts.view(1, -1), []
        if batch.total_count(len(x)) > 1:
            candidates = torch.cat([self.search.sample(self.generator("candidates")), candidates.cpu().double()])
        fitnesses = []
        for candidate in candidates:
            features, tokens, logits = self.site.run(self.source, x, candidate.view_as(self.prompts))
            self.require_image_logits(logits)
            distance = self.site.distance_to_source(batch.gather(tokens), self.source_stats)
            fitnesses.append(batch.gather(entropy(logits)).mean() + self.discrepancy / 64 * distance)
            found.append(features)
        fitness = read(torch.stack(fitnesses))[0].double()
        best = found[int(fitness.nan_to_num(nan=torch.inf).argmin())]
        mean = batch.gather(torch.stack(found).mean(0)).mean(0)
        return get_head(self.source)(self.feature_shift.move(best)), candidates, fitness, mean

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        return self.site.install_(super().deploy(batches), self.prompts, self.feature_shift.offset)
