"""VANE: views, label autocorrelation, normalization by distance, and entropy; the default of :func:`ctta.adapt`."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_call, current_reducer, read
from ctta.core.validation import check_each, check_fraction, check_non_negative, check_positive
from ctta.errors import ConfigError
from ctta.functional import at_least_float32, confidence, mean_probabilities, soft_likelihood_ratio
from ctta.methods.vane.constants import (
    DOMAIN_MEMORY,
    FLIP,
    FREQUENCY_MOMENTUM,
    HIDDEN_RUN_RATIO,
    MAX_DEVIATION,
    MOVED,
    SOURCE_SIZE,
    UNINFORMATIVE_PROBABILITY,
    UNKNOWN_DOMAINS_MEMORY,
)
from ctta.methods.vane.statistics import (
    FollowedBatch,
    LayerState,
    MeasureDeviation,
    measure_deviations,
    measure_fraction,
    store_layers_,
    use_shift_statistics_,
)
from ctta.methods.vane.stream import (
    ChainState,
    DomainState,
    MirrorState,
    SampleState,
    StateBuffers,
    measure_appearance,
    update_chain,
    update_domain,
    update_mirrors,
    update_sample,
)
from ctta.nn import FULL_BATCH_SIZE, attach_norm_hooks_, find_norm_parameters
from ctta.optim import OptimizerFactory, with_lr
from ctta.policies import average_with_source
from ctta.views import Model, Views, average_views, check_views, draw_views
from ctta.views.geometric import GeometricViews, MovedView


class ViewPredictions(NamedTuple):
    """What the student predicts for views of a batch.

    Attributes:
        mirrored: The logits for mirrored images, kept apart until the check decides; None if nothing is checked.
        mean: The mean logits over the other views; None if there are none.
        num_views: The number of these.
    """

    mirrored: Tensor | None
    mean: Tensor | None
    num_views: int

    def average_with(self, direct: Tensor, *, with_mirrored: bool) -> Tensor:
        """Return the mean of the direct prediction and those for views."""
        total, count = direct, 1
        if self.mean is not None:
            total, count = total + self.num_views * self.mean, count + self.num_views
        if self.mirrored is not None and with_mirrored:
            total, count = total + self.mirrored, count + 1
        return total / count

    def replace_given(self, tensors: Iterable[Tensor]) -> "ViewPredictions":
        """Return these predictions from other tensors, of which there are as many as were given."""
        others = iter(tensors)
        mirrored, mean = (None if each is None else next(others) for each in self[:2])
        return ViewPredictions(mirrored, mean, self.num_views)


class VaneState(NamedTuple):
    """What VANE knows about the stream after a batch, besides what it has learned.

    Attributes:
        domain: The appearance of the domain.
        mirrors: Whether mirrored images keep their class.
        source_chain: How much labels repeat by the predictions of the source.
        chain: How much they repeat by the answers of the student and its views.
        sample: How much the statistics of recent images are worth.
        layers: The statistics of BatchNorm layers that the batch has changed.
    """

    domain: DomainState
    mirrors: MirrorState
    source_chain: ChainState
    chain: ChainState
    sample: SampleState
    layers: Mapping[nn.Module, LayerState]


@dataclass(frozen=True)
class Seen:
    """What VANE knows of a batch before it predicts.

    Attributes:
        x: The local rows that are no outliers.
        segments: Whether the network labels pixels.
        num_images: How many rows of the whole batch are no outliers.
        features: The appearance of these, on the CPU.
        sources: The source's logits of these on the CPU, if needed.
        rows: Which of the local rows are no outliers; None for all.
        source_logits: The source's logits of all local rows, if there are outliers.
    """

    x: Tensor
    segments: bool
    num_images: int
    features: Tensor
    sources: tuple[Tensor, ...]
    rows: Tensor | None = None
    source_logits: Tensor | None = None

    def answer_by_source(self) -> Tensor:
        """Return the source's logits of a batch of outliers."""
        assert self.source_logits is not None, "there are outliers"
        return self.source_logits

    def fill(self, logits: Tensor) -> Tensor:
        """Return logits of the local rows, those of outliers by the source."""
        if self.rows is None:
            return logits
        filled = self.answer_by_source().to(logits.dtype, copy=True)
        filled[self.rows] = logits[: int(self.rows.sum())]
        return filled


class VanePrediction(NamedTuple):
    """What VANE predicts for a batch.

    Attributes:
        logits: Those of the student, with a graph.
        answer: What the caller gets.
        state: The state after the batch.
        is_finite: Whether all of the predictions are.
    """

    logits: Tensor
    answer: Tensor
    state: VaneState
    is_finite: bool


class VANE(AdaptiveModel):
    """Adapt to a stream whatever its order and its batch size are; what ``ctta.adapt(net)`` uses.

    It has these parts, and each but the outliers can be switched off:

    * Statistics of BatchNorm are a mean of the source's and those of recent images, whose weight increases with their
      distance from the source's.
    * When pixels show a new domain, class frequencies are reset and older statistics count less.
    * Images far outside of what the source has seen, such as those of a broken sensor, are answered by the source and
      change nothing; so is every image of a stream that is scaled wrongly.
    * Predictions are averaged over views, each with statistics of its own; over mirrored images only if they seem to
      keep their class, unlike digits or letters.
    * Where consecutive images tend to have the same label, the prediction for one counts for its neighbors.
    * The scales and shifts of norm layers learn as in SLR and stay near the source's, but not while labels repeat.

    The last two are for networks with one prediction per image.

    Args:
        net: Any network. Without BatchNorm the first part does nothing, and without norm layers the last.
        tolerance: The distance from the source's statistics at which layers go half of the way that they go at most;
            None to keep the source's statistics.
        horizon: How many images the statistics of the stream remember.
        max_distance: The distance in brightness, contrast and sharpness at which images belong to a new domain: mean
            squared, in units of the variance between images. None to detect no domains; class frequencies then
            remember 200 images instead of 1,000.
        views: What to average over beside the images themselves; () for nothing. Inputs that are not images have none.
        pixel_views: The same for networks that segment. Motion would cost sharpness, so the default is a flip.
        flips: Whether :func:`ctta.views.geometric_views` may mirror images; ``"auto"`` to compare confident predictions
            for images and mirrored images. Networks that segment may, unless this is False.
        min_stickiness: How much labels must repeat before predictions are corrected for it; 1 for never.
        learn: Whether norm layers learn.
        keep: The fraction of the adapted weights that a step keeps; the rest are the source's.
        weight: The weight of the likelihood ratio beside the diversity of the predictions, as in SLR.
        seed: The seed of the views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = VANE(net)(torch.rand(16, 3, 8, 8))    # predicts and adapts
    """

    info = MethodInfo("VANE", trains="norm layers", forward_passes="2, and views", backward_passes=1, num_networks=2)
    checks_values_late = True
    #: How far layers go with certainty, from the batch before.
    fraction: Tensor
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fast": {"views": FLIP}}

    def __init__(
        self,
        net: nn.Module,
        *,
        tolerance: float | None = 0.025,
        horizon: float = 64.0,
        max_distance: float | None = 0.5,
        views: Views = MOVED,
        pixel_views: Views = FLIP,
        flips: bool | Literal["auto"] = "auto",
        min_stickiness: float = 0.45,
        learn: bool = True,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        keep: float = 0.99,
        weight: float = 0.025,
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_each(check_non_negative, tolerance=tolerance or 0.0, weight=weight)
        check_positive("horizon", horizon)
        if max_distance is not None:
            check_positive("max_distance", max_distance)
            if math.isinf(max_distance):
                raise ConfigError("max_distance must be finite; give None to detect no domains")
        if not isinstance(flips, bool) and flips != "auto":
            raise ConfigError(f"flips must be True, False or 'auto', got {flips!r}")
        check_views(views, pixel_views)
        check_fraction("min_stickiness", min_stickiness)
        self.tolerance, self.horizon, self.max_distance = tolerance, horizon, max_distance
        self.views, self.pixel_views, self.flips = views, pixel_views, flips
        self.min_stickiness, self.learn, self.keep, self.weight = min_stickiness, learn, keep, weight
        self.student = self.copy_of_source()
        self.statistics = nn.ModuleList()
        if tolerance is not None:
            self.statistics = use_shift_statistics_(self.student)
            attach_norm_hooks_(self.source, lambda layer: MeasureDeviation(), skip_without_statistics=True)
        if self.statistics:
            self.register_buffer("fraction", torch.zeros_like(self.statistics[0].get_buffer("scatter")))
        self.domain_change = StateBuffers(DomainState.initial())
        self.mirror_check = StateBuffers(MirrorState.initial())
        self.source_chain, self.chain = (StateBuffers(ChainState.initial()) for _ in range(2))
        self.sample = StateBuffers(SampleState.initial())
        # Shapes of batches for which the network is known to label pixels. Not a state: it follows from the network.
        self._segmented_shapes: set[torch.Size] = set()
        self.optimizer_factory = with_lr(optimizer, self._lr)  # a hyperparameter also of a model that learns nothing
        self._learns = learn and bool(find_norm_parameters(self.student))
        if self._learns:
            self.train_norms_(self.student)
        if self.policies or self._learns:
            self.optimize(self.student, self.optimizer_factory)
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
        return min(1.0, (current_call().num_images or FULL_BATCH_SIZE) / FULL_BATCH_SIZE) ** 2

    @override
    def extra_repr(self) -> str:
        state = self._stream_state()
        labels = "change" if self._labels_look_iid(state) else "repeat"
        mirrors = f", mirrors={self._mirrors(state)}" if isinstance(self.views, GeometricViews) else ""
        return f"{super().extra_repr()}, followed_layers={len(self.statistics)}, labels={labels!r}{mirrors}"

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        with self._look(x) as seen:
            if seen.num_images == 0:
                return seen.answer_by_source()
            logits, answer, state, is_finite = self._predict(seen, self.student)
            of_labels = state.source_chain if state.source_chain.is_started else state.chain
            if self._learns and logits.ndim == 2 and self._labels_look_iid(state) and not of_labels.one_class_prevails:
                # Views alone may overflow; the step then counts as skipped.
                self._learn(logits if is_finite else logits * torch.nan, state.chain)
            if is_finite:
                self._store(state)
            self.set_policy_logits(seen.fill(logits.detach()))
            return seen.fill(answer)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._answer(x, self.student)

    @override
    def _forward_once(self, x: Tensor) -> Tensor:
        # With its own statistics: those that the last batch left may be of another domain.
        with self._look(x, ask_source=False) as seen:
            if seen.num_images == 0:
                return seen.answer_by_source()
            state, is_new = self._update_domain(seen.features)
            batch = self._follow(seen, self.student, state, is_new)[1] if self.statistics else None
            with change_call(batch_facts=batch):
                logits: Tensor = self.student(seen.x)
            return seen.fill(logits)

    def _answer(self, x: Tensor, student: Model) -> Tensor:
        with self._look(x) as seen:
            return seen.fill(self._predict(seen, student).answer) if seen.num_images else seen.answer_by_source()

    @override
    @torch.no_grad()
    def anchor_logits(self, x: Tensor) -> Tensor:
        """Return the answer of a model that has followed the stream and learned nothing."""
        weights: dict[str, Tensor] = dict(self.source.named_parameters())
        return self._answer(x, lambda images: functional_call(self.student, weights, (images,)))

    def _stream_state(self) -> VaneState:
        """Return the state after the last batch."""
        chains = self.source_chain.state, self.chain.state
        return VaneState(self.domain_change.state, self.mirror_check.state, *chains, self.sample.state, {})

    def _store(self, state: VaneState) -> None:
        self.domain_change.store_(state.domain)
        self.mirror_check.store_(state.mirrors)
        self.source_chain.store_(state.source_chain)
        self.chain.store_(state.chain)
        self.sample.store_(state.sample)
        if self.statistics:
            store_layers_(self.student, self.statistics, state.layers)
            self.fraction.copy_(self._measure_fraction(state.layers))

    def _mirrors(self, state: VaneState) -> bool:
        return state.mirrors.keeps_classes if self.flips == "auto" else self.flips

    def _labels_look_iid(self, state: VaneState) -> bool:
        return state.chain.stickiness <= self.min_stickiness and not self._labels_are_hidden(state)

    def _labels_are_hidden(self, state: VaneState) -> bool:
        """Return whether the source sees labels that repeat and the student does not, for its statistics hide them."""
        of_source, of_student = state.source_chain.stickiness, state.chain.stickiness
        return of_source > self.min_stickiness and 1 - of_student > HIDDEN_RUN_RATIO * (1 - of_source)

    @contextmanager
    def _look(self, x: Tensor, *, ask_source: bool = True) -> Iterator[Seen]:
        """Measure a batch; within the context it consists of its rows but outliers.

        Args:
            x: The local rows.
            ask_source: Whether the source predicts the batch, which only the label chain needs.
        """
        reducer, segments = current_reducer(), x.shape in self._segmented_shapes
        measured, source = [measure_appearance(x)], None
        if self.statistics:
            measured.append(measure_deviations(self.source, x))
        if self.statistics and ask_source and not segments:
            with torch.no_grad():
                source = at_least_float32(self.source(x))
            segments = source.ndim > 2
            measured += [] if segments else [source]
        features, *others = read(*map(reducer.gather, measured))
        usual = others[0] <= MAX_DEVIATION**2 if others else torch.ones(len(features), dtype=torch.bool, device="cpu")
        sources = tuple(others[1:])
        if usual.all():
            yield Seen(x, segments, len(features), features, sources)
            return
        rows = reducer.local(usual).to(x.device)
        if source is None:
            with torch.no_grad():
                source = at_least_float32(self.source(x))
        kept = x[rows] if len(x[rows]) else torch.zeros_like(x[:1])  # all that are kept may be on other processes
        seen = Seen(kept, segments, int(usual.sum()), features[usual], tuple(each[usual] for each in sources))
        with reducer.subset(rows), change_call(num_images=seen.num_images):
            yield replace(seen, rows=rows, source_logits=source)

    def _predict(self, seen: Seen, student: Model) -> VanePrediction:
        """Return what the student and the views predict, and the state after the batch; nothing changes."""
        reducer, of_source = current_reducer(), None
        x, segments = seen.x, seen.segments
        class_memory = UNKNOWN_DOMAINS_MEMORY if self.max_distance is None else DOMAIN_MEMORY
        state, is_new = self._update_domain(seen.features)
        for source in seen.sources:
            # Of the source, since a prediction by batch statistics depends on the other labels of the batch.
            source_chain, of_source = update_chain(
                state.source_chain, source, class_memory, uninformative=UNINFORMATIVE_PROBABILITY, is_new_domain=is_new
            )
            state = state._replace(source_chain=source_chain)
        batch = None
        if self.statistics:
            sample, batch = self._follow(seen, student, state, is_new)
            state = state._replace(sample=sample, layers=batch.layers)
        with (
            change_call(batch_facts=batch),
            torch.set_grad_enabled(torch.is_grad_enabled() and self._learns and not segments),
        ):
            logits = student(x)
        segments = logits.ndim > 2
        with change_call(batch_facts=None if batch is None else replace(batch, is_view=True)):
            views = self._predict_views(x, student, segments, state)
        direct = at_least_float32(logits.detach())
        if segments:
            self._segmented_shapes.add(x.shape)
            answer = views.average_with(direct, with_mirrored=False)
            return VanePrediction(logits, answer, state, reducer.all(answer.isfinite()))
        direct, *others = read(*(reducer.gather(each) for each in (direct, *views[:2]) if each is not None))
        views = views.replace_given(others)
        if views.mirrored is not None:
            state = state._replace(mirrors=update_mirrors(state.mirrors, direct, views.mirrored))
        answer = views.average_with(direct, with_mirrored=self._mirrors(state))
        # The posterior of a chain is finite whatever the predictions are, and would hide an overflow.
        is_finite = bool(answer.isfinite().all())
        chain, corrected = update_chain(state.chain, answer, class_memory, is_new_domain=is_new)
        state = state._replace(chain=chain)
        if is_finite and of_source is not None and self._labels_are_hidden(state):
            answer = of_source
        elif is_finite and not self._labels_look_iid(state):
            answer = corrected
        return VanePrediction(logits, reducer.local(answer).to(logits.device), state, is_finite)

    def _update_domain(self, features: Tensor) -> tuple[VaneState, bool]:
        """Return the state with the appearance of a batch, and whether the batch begins a new domain."""
        state = self._stream_state()
        domain, is_new = update_domain(state.domain, features, self.max_distance)
        return state._replace(domain=domain), is_new

    def _follow(self, seen: Seen, student: Model, state: VaneState, is_new: bool) -> tuple[SampleState, FollowedBatch]:
        """Return how much a batch counts, which decreases as its labels repeat, and how far layers move.

        How far is known from the batch before. Where there is none of the same domain, a pass of the student tells.
        """
        # The chain of a network that segments never starts.
        stickiness = state.source_chain.stickiness if state.source_chain.is_started else 0.0
        threshold = self.min_stickiness
        repeats = (stickiness - threshold) / (1 - threshold) if stickiness > threshold else 0.0
        sample, share = update_sample(state.sample, seen.num_images, repeats, self.horizon, is_new_domain=is_new)
        size = float(sample.size)
        certainty = size / (size + SOURCE_SIZE)
        batch = FollowedBatch(share, size, certainty * self.fraction)
        if share == 1:
            with torch.no_grad(), change_call(batch_facts=batch):
                student(seen.x)
            batch = replace(batch, fraction=certainty * self._measure_fraction(batch.layers), layers={})
        return sample, batch

    def _measure_fraction(self, layers: Mapping[nn.Module, LayerState]) -> Tensor:
        assert self.tolerance is not None, "there are statistics"
        return (
            measure_fraction([each.distance for each in layers.values()], self.tolerance) if layers else self.fraction
        )

    @torch.no_grad()
    def _predict_views(self, x: Tensor, student: Model, segments: bool, state: VaneState) -> ViewPredictions:
        given = self.pixel_views if segments else self.views
        if not given or x.ndim != 4:
            return ViewPredictions(None, None, 0)
        views, mirrored = list(draw_views(given, self.generator("views"))), None
        if isinstance(given, GeometricViews) and (self.flips is False or (self.flips == "auto" and not segments)):
            flip = views.pop(0)
            if self.flips == "auto":
                mirrored = average_views([flip], student, x, "logits")
            if not self._mirrors(state):
                views = [replace(view, flip=False) if isinstance(view, MovedView) else view for view in views]
        mean = average_views(views, student, x, "logits") if views else None
        return ViewPredictions(mirrored, mean, len(views))

    def _learn(self, logits: Tensor, chain: ChainState) -> None:
        p = mean_probabilities(logits)
        frequencies = FREQUENCY_MOMENTUM * chain.frequencies.to(p) + (1 - FREQUENCY_MOMENTUM) * p
        diversity = torch.special.xlogy(frequencies, frequencies).sum()
        ratio = soft_likelihood_ratio(logits).mean()
        self.minimize(diversity + self.weight * ratio, confidence=confidence(logits.detach()).mean())
