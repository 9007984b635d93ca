"""VANE: views, label autocorrelation, normalization by distance, and entropy; the default of :func:`ctta.adapt`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from ctta.base import AdaptiveModel
from ctta.domain_change import DOMAIN_MEMORY, DomainChange, measure_appearance
from ctta.functional import at_least_float32, confidence, mean_probabilities, soft_likelihood_ratio
from ctta.label_chain import LabelChain
from ctta.method_info import MethodInfo
from ctta.norms import FULL_BATCH_SIZE, find_norm_parameters, images_in_batch
from ctta.norms.shift import FollowedBatch, follow_shift, use_shift_statistics_
from ctta.optim import OptimizerFactory
from ctta.parallel import current_reducer
from ctta.policies import average_with_source
from ctta.state import remember_buffers
from ctta.steps import Policy
from ctta.surgery import Output
from ctta.validation import check_each, check_fraction, check_non_negative, check_positive
from ctta.views import Model, ScaledView, Views, average_views, check_views, draw_views, geometric_views

MOVED: Views = geometric_views(4)
FLIP: Views = (ScaledView(1.0, flip=True, multiple_of=None),)
MOMENTUM = 0.9  # of the class frequencies that predictions are kept diverse by, as in SLR
#: Predictions that class frequencies average over if changes of the domain are not detected.
UNKNOWN_DOMAINS_MEMORY = 200
#: How often a prediction of the source is taken to say nothing.
DOUBT = 0.3
#: Batch statistics of few classes hide these classes. Assume so if labels repeat by this much more for the source than
#: for the student, once the domain has enough images to know which classes the source prefers.
HIDDEN_STICKINESS, MIN_DOMAIN = 0.2, 200


class VANE(AdaptiveModel):
    """Adapt to a stream whatever its order and its batch size are; what ``ctta.adapt(net)`` uses.

    It has five parts, and each can be switched off:

    * Statistics of BatchNorm are those of recent images, the more, the further they are from the source's.
    * When pixels show a new domain, class frequencies are reset and older statistics count less.
    * Predictions are averaged over views, each with statistics of its own.
    * Where consecutive images tend to have the same label, the prediction for one counts for its neighbors.
    * The scales and shifts of norm layers learn as in SLR and stay near the source's, but not while labels repeat.

    The last two are for networks with one prediction per image.

    Args:
        net: Any network. Without BatchNorm the first part does nothing, and without norm layers the last.
        tolerance: The distance from the source's statistics at which those of the stream count as much; None to keep
            the source's.
        prior: How many images the source's statistics count for.
        horizon: How many images the statistics of the stream remember.
        max_distance: The distance in brightness, contrast and sharpness at which images belong to a new domain: mean
            squared, in units of the variance between images. None to detect no domains.
        views: What to average over beside the images themselves; () for nothing. Inputs that are not images have none.
        pixel_views: The same for networks that segment. Motion would cost sharpness, so the default is a flip.
        min_stickiness: How much labels must repeat before predictions are corrected for it; 1 for never.
        learn: Whether norm layers learn.
        optimizer: A factory of the optimizer.
        lr: The learning rate, if it should differ from that of ``optimizer``.
        keep: The fraction of the adapted weights that a step keeps; the rest are the source's.
        weight: The weight of the likelihood ratio beside the diversity of the predictions, as in SLR.
        policies: What happens around the updates, see :mod:`ctta.policies`.
        seed: The seed of the views.
        output: Where the logits are in the network's output; by default the usual places.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = VANE(net)(torch.rand(16, 3, 8, 8))    # predicts and adapts
    """

    info = MethodInfo("VANE", trains="norm layers", forward_passes="2, and views", backward_passes=1, num_networks=2)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fast": {"views": FLIP}}

    def __init__(
        self,
        net: nn.Module,
        *,
        tolerance: float | None = 0.2,
        prior: float = 8.0,
        horizon: float = 64.0,
        max_distance: float | None = 0.5,
        views: Views = MOVED,
        pixel_views: Views = FLIP,
        min_stickiness: float = 0.45,
        learn: bool = True,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        lr: float | None = None,
        keep: float = 0.99,
        weight: float = 0.025,
        policies: Sequence[Policy] = (),
        seed: int = 0,
        output: Output = None,
    ) -> None:
        super().__init__(net, policies=policies, batch_stats=0.0, seed=seed, output=output)
        check_each(check_non_negative, tolerance=tolerance or 0.0, prior=prior, weight=weight)
        check_positive("horizon", horizon)
        if max_distance is not None:
            check_positive("max_distance", max_distance)
        check_views(views, pixel_views)
        check_fraction("min_stickiness", min_stickiness)
        self.tolerance, self.prior, self.horizon, self.max_distance = tolerance, prior, horizon, max_distance
        self.views, self.pixel_views = views, pixel_views
        self.min_stickiness, self.learn, self.keep, self.weight = min_stickiness, learn, keep, weight
        self.student = self.copy_of_source()
        self.statistics = nn.ModuleList()
        if tolerance is not None:
            self.statistics = use_shift_statistics_(self.student, tolerance, prior, horizon)
        self.domain_change = DomainChange(max_distance)
        memory = UNKNOWN_DOMAINS_MEMORY if max_distance is None else DOMAIN_MEMORY
        self.source_chain, self.chain = LabelChain(DOUBT, memory), LabelChain(class_memory=memory)
        self.train_norms_(self.student)
        if find_norm_parameters(self.student) or policies:
            self.optimize(self.student, optimizer, lr)
            self.use_policies(average_with_source(keep))

    @classmethod
    def fast(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build VANE with one view, the flipped images: about half of the passes.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**cls.presets["fast"], **overrides})

    @property
    @override
    def step_scale(self) -> float:
        return min(1.0, (images_in_batch() or FULL_BATCH_SIZE) / FULL_BATCH_SIZE) ** 2

    @override
    def extra_repr(self) -> str:
        labels = "change" if self._labels_change() else "repeat"
        return f"{super().extra_repr()}, followed_layers={len(self.statistics)}, labels={labels!r}"

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        forget = self._remember()
        logits, answer = self._predict(x, self.student)
        if self.learn and self.optimizer is not None and logits.ndim == 2 and self._labels_change():
            self._learn(logits)
        self.show_policies(logits)
        if not current_reducer().all(answer.isfinite()):
            forget()
        return answer

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        forget = self._remember()
        try:
            return self._predict(x, self.student)[1]
        finally:
            forget()

    @override
    def _forward_once(self, x: Tensor) -> Tensor:
        # With its own statistics: those that the last batch left may be of another domain.
        forget = self._remember()
        try:
            with follow_shift(self._weigh_batch(x, self._is_new_domain(x))):
                logits: Tensor = self.student(x)
            return logits
        finally:
            forget()

    @override
    @torch.no_grad()
    def anchor_logits(self, x: Tensor) -> Tensor:
        """Return the answer of a model that has followed the stream and learned nothing."""
        forget = self._remember()
        weights: dict[str, Tensor] = dict(self.source.named_parameters())
        try:
            return self._predict(x, lambda images: functional_call(self.student, weights, (images,)))[1]
        finally:
            forget()

    def _remember(self) -> Callable[[], None]:
        return remember_buffers(self.student, self.statistics, self.domain_change, self.source_chain, self.chain)

    def _labels_change(self) -> bool:
        return self.chain.stickiness <= self.min_stickiness and not self._labels_are_hidden()

    def _labels_are_hidden(self) -> bool:
        """Return whether the source sees labels that repeat and the student does not, for its statistics hide them."""
        if self.domain_change.num_images < MIN_DOMAIN:
            return False
        return self.source_chain.stickiness > max(self.min_stickiness, self.chain.stickiness + HIDDEN_STICKINESS)

    def _predict(self, x: Tensor, student: Model) -> tuple[Tensor, Tensor]:
        """Return the student's logits and the answer, and follow the stream."""
        reducer, of_source = current_reducer(), None
        is_new = self._is_new_domain(x)
        if self.statistics:
            with torch.no_grad():
                source = self.source(x)
            if source.ndim == 2:
                # Of the source, since a prediction by batch statistics depends on the other labels of the batch.
                of_source = reducer.local(self.source_chain.follow_(reducer.gather(source), is_new_domain=is_new))
            batch = self._weigh_batch(x, is_new)
            # First, as they do not count, and each has its own statistics.
            with follow_shift(batch._replace(is_view=True)):
                refined = self._average_views(x, student, source)
            with follow_shift(batch):
                logits = student(x)
        else:
            logits = student(x)
            refined = self._average_views(x, student, logits)
        answer = at_least_float32(logits.detach())
        if refined is not None:
            mean, num_views = refined
            answer = (answer + num_views * mean) / (num_views + 1)
        if logits.ndim == 2:
            corrected = reducer.local(self.chain.follow_(reducer.gather(answer), is_new_domain=is_new))
            if of_source is not None and self._labels_are_hidden():
                answer = of_source
            elif not self._labels_change():
                answer = corrected
        return logits, answer

    def _is_new_domain(self, x: Tensor) -> bool:
        return self.domain_change.follow_(current_reducer().gather(measure_appearance(x)))

    def _weigh_batch(self, x: Tensor, is_new_domain: bool) -> FollowedBatch:
        """Return how much the statistics of a batch count: the less, the more its labels repeat."""
        num_images, stickiness = images_in_batch() or len(x), self.source_chain.stickiness
        is_followed = self.source_chain.is_allocated  # not by networks that segment
        worth = num_images * (1 - stickiness) / (1 + stickiness) if is_followed else num_images
        return FollowedBatch(num_images, worth, is_new_domain)

    @torch.no_grad()
    def _average_views(self, x: Tensor, student: Model, like: Tensor) -> tuple[Tensor, int] | None:
        """Return the student's mean prediction over the views and their number; None if there are none."""
        given = self.views if like.ndim == 2 else self.pixel_views
        if not given or x.ndim != 4:
            return None
        views = draw_views(given, self.generator("views"))
        return average_views(views, student, x, "logits"), len(views)

    def _learn(self, logits: Tensor) -> None:
        p = mean_probabilities(logits)
        frequencies = MOMENTUM * self.chain.frequencies.to(p) + (1 - MOMENTUM) * p
        diversity = torch.special.xlogy(frequencies, frequencies).sum()
        ratio = soft_likelihood_ratio(logits).mean()
        self.minimize(diversity + self.weight * ratio, confidence=confidence(logits.detach()).mean())
