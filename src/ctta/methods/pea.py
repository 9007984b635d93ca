"""PEA: align the tokens after each block of a vision transformer with the statistics of source images."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_reducer, read
from ctta.core.validation import check_each, check_fraction, check_integer, check_positive
from ctta.functional import at_least_float32, entropy
from ctta.nn import BatchStats
from ctta.nn.vit import find_blocks
from ctta.source_stats import SourceStats

#: Added to the diagonal of covariances, and the least eigenvalue of one that is inverted.
MIN_VARIANCE = 1e-5
#: A block whose weight is below this is not aligned, and its statistics do not change.
MIN_WEIGHT = 1e-3
#: The central part of the second view.
CROP = 0.9


class StreamStatistics(NamedTuple):
    """What PEA knows of the stream.

    Attributes:
        means: The mean token after each block (L, d).
        covariances: The covariance of the tokens (L, d, d).
        drifts: How much the mean of a batch differed from the mean before, smoothed (L).
        started: Whether a block has statistics (L).
        entropy: The mean entropy of predictions, smoothed; infinite before the first batch.
    """

    means: Tensor
    covariances: Tensor
    drifts: Tensor
    started: Tensor
    entropy: Tensor


class PEA(AdaptiveModel):
    """Move tokens toward the mean and the covariance of the source's, block by block; nothing is trained.

    A first pass measures how far the class tokens after each block are from the source's. The second aligns each block
    in proportion; the block with the least distance stays as it is. Predictions are averaged over views.

    Args:
        net: A vision transformer with a class token, such as timm's, torchvision's or transformers' ViT.
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches, blocks=True)``; the reference has
            50,000 images.
        momentum: How far a batch moves the statistics of the stream.
        spike: A batch whose mean is further away than this times the usual replaces the statistics of its block.
        smoothing: The fraction of a batch in what is usual.
        max_rise: The rise of the entropy above what is usual after which all statistics start anew.
        group_size: The number of channels that are aligned together; 768 are all of a ViT-B.
        num_views: How many views are averaged over beside the images: the center, and then the mirrored images.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any.

    >>> import ctta
    >>> net, x = ctta.testing.networks.BlockViT(), torch.rand(32, 3, 16, 16)
    >>> logits = PEA(net, source_stats=ctta.source_stats(net, [x], blocks=True))(torch.rand(4, 3, 16, 16))

    Reference: Xiao et al., "Architecture-agnostic test-time adaptation via backprop-free embedding alignment",
    ICLR 2026.
    """

    source_factors: Tensor

    info = MethodInfo(
        "PEA",
        "Xiao et al., ICLR 2026",
        "token statistics",
        6,
        needs_source_data=True,
        labels_pixels=False,
        needs_vit=True,
    )
    checks_values_late = True
    means: Tensor
    covariances: Tensor
    drifts: Tensor
    started: Tensor
    entropy: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        momentum: float = 0.02,
        spike: float = 4.0,
        smoothing: float = 0.2,
        max_rise: float = 1.0,
        group_size: int = 768,
        num_views: int = 2,
        batch_stats: BatchStats = "auto",
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)
        check_each(check_fraction, momentum=momentum, smoothing=smoothing)
        check_each(check_positive, spike=spike, max_rise=max_rise)
        self.momentum, self.spike, self.smoothing, self.max_rise = momentum, spike, smoothing, max_rise
        self.group_size = check_integer("group_size", group_size, 1)
        self.num_views = check_integer("num_views", num_views, 0, 2)
        self.blocks = find_blocks(self.source)
        stats = self.use_source_stats(source_stats, "block_outputs.mean", "block_outputs.covariance")
        mean = at_least_float32(stats.by_name("block_outputs.mean")[self.blocks[0]])
        num_blocks, width = len(self.blocks), len(mean)
        start = StreamStatistics(
            mean.new_zeros(num_blocks, width),
            mean.new_zeros(num_blocks, width, width),
            mean.new_zeros(num_blocks),
            torch.zeros(num_blocks, dtype=torch.bool),
            mean.new_full((), torch.inf),
        )
        for name, value in start._asdict().items():
            self.register_buffer(name, value)
        covariances = torch.stack([stats[f"block_outputs.covariance/{name}"].to(mean) for name in self.blocks])
        self.register_buffer("source_factors", _factor(_regularize(self._split(covariances)), 0.5))  # (L, groups, g, g)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits, state = self._align(x)
        is_finite = torch.stack([each.isfinite().all() for each in state[:3]]).all() & state.entropy.isfinite()
        for name, value in state._asdict().items():  # one overflow would stay in the averages forever
            buffer = self.get_buffer(name)
            buffer.copy_(torch.where(is_finite, value, buffer))
        return logits

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._align(x)[0]

    @torch.no_grad()
    def _align(self, x: Tensor) -> tuple[Tensor, StreamStatistics]:
        """Return the predictions of a batch, and the statistics after it."""
        # The views pass each block together, so that one decomposition of their covariances serves all of them.
        views = torch.cat([x, _crop_center(x), x.flip(3)][: self.num_views + 1])
        parts = (self.num_views + 1, len(x))
        with change_call(num_parts=self.num_views + 1):
            weights = self._weigh_blocks(views)
            state = StreamStatistics(*(self.get_buffer(name).clone() for name in StreamStatistics._fields))

            def align_block(number: int, tokens: Tensor) -> Tensor:
                if weights[number] < MIN_WEIGHT:
                    return tokens
                values = at_least_float32(tokens)
                with torch.autocast(tokens.device.type, enabled=False):
                    aligned = self._move(values.unflatten(0, parts), state, number).flatten(0, 1)
                return (values + weights[number] * (aligned - values)).to(tokens)

            with self._change_outputs(align_block):
                logits = self.source(views)
            self.require_image_logits(logits)
        logits = logits.unflatten(0, parts).mean(0)
        return logits, self._finish(state, logits)

    def _weigh_blocks(self, views: Tensor) -> list[float]:
        """Return the weight of each block, from 0 for the least distance to the source to 1 for the largest."""
        tokens: list[Tensor] = []

        def record(number: int, output: Tensor) -> Tensor:
            classes = at_least_float32(output[:, 0]).unflatten(0, (self.num_views + 1, -1))
            tokens.append(torch.cat([current_reducer().gather(part) for part in classes]))
            return output

        with self._change_outputs(record):
            self.source(views)
        distances = []
        for number, values in enumerate(tokens):
            mean, covariance = self._source(number)
            variance = values.var(0, correction=min(1, len(values) - 1))
            distances.append((mean - values.mean(0)).norm() + (covariance.diagonal() - variance).norm())
        distance = torch.stack(distances)
        span = distance.max() - distance.min()
        return read(torch.where(span > 0, (distance - distance.min()) / span, 0.0))[0].tolist()

    def _source(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance of the source's tokens after a block."""
        names = ("block_outputs.mean", "block_outputs.covariance")
        mean, covariance = (self.source_stats[f"{name}/{self.blocks[number]}"].to(self.means) for name in names)
        return mean, covariance

    def _split(self, covariances: Tensor) -> Tensor:
        """Return the covariances (..., groups, g, g) of groups of channels, the last one filled up with zeros."""
        size = min(self.group_size, covariances.shape[-1])
        missing = -covariances.shape[-1] % size
        padded = F.pad(covariances, (0, missing, 0, missing))
        blocks: Tensor = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
        return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def _follow_(self, state: StreamStatistics, number: int, tokens: Tensor) -> None:
        """Move the statistics of a block toward tokens (T, d); a spike replaces them."""
        mean = tokens.mean(0)
        covariance = _regularize((tokens - mean).T @ (tokens - mean) / max(len(tokens) - 1, 1))
        drift = (mean - state.means[number]).abs().mean()
        usual = torch.lerp(state.drifts[number], drift, self.smoothing)
        is_first = ~state.started[number]
        is_spike = (usual > 1e-6) & (drift > self.spike * usual)
        rate = mean.new_full((), self.momentum).masked_fill(is_first | is_spike, 1.0)  # a float64 with its digits
        state.means[number].lerp_(mean, rate)
        state.covariances[number].lerp_(covariance, rate)
        state.drifts[number] = torch.where(is_first, 0.0, usual)
        state.started[number] = True

    def _move(self, values: Tensor, state: StreamStatistics, number: int) -> Tensor:
        """Return tokens (V, N, T, d) with the mean and the covariance of the source's, view by view.

        The statistics of the block follow each view before it is moved.
        """
        found = []
        for tokens in values:
            self._follow_(state, number, current_reducer().gather(tokens).flatten(0, 1))
            found.append((state.means[number].clone(), state.covariances[number].clone()))
        means, covariances = map(torch.stack, zip(*found, strict=True))
        factor, of_source = _factor(self._split(covariances), -0.5), self.source_factors[number]
        change = factor @ factor.mT @ (of_source @ of_source.mT)  # (V, groups, g, g)
        missing = change.shape[1] * change.shape[2] - values.shape[-1]
        centered = F.pad(values - means[:, None, None], (0, missing)).unflatten(-1, (-1, change.shape[2]))
        aligned = torch.einsum("vntkg,vkgh->vntkh", centered, change).flatten(-2)
        return aligned[..., : values.shape[-1]] + self._source(number)[0]

    def _finish(self, state: StreamStatistics, logits: Tensor) -> StreamStatistics:
        """Return the statistics after a batch, which start anew if the entropy has risen too far."""
        latest = current_reducer().mean(at_least_float32(entropy(logits)).mean()).to(state.entropy)
        is_reset = latest > state.entropy + self.max_rise
        is_known = state.entropy.isfinite() & ~is_reset
        usual = torch.where(is_known, torch.lerp(state.entropy, latest, self.smoothing), latest)
        means, covariances, drifts, started = (
            torch.where(is_reset, torch.zeros_like(each), each) for each in state[:4]
        )
        return StreamStatistics(means, covariances, drifts, started, usual)

    @contextmanager
    def _change_outputs(self, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Replace the tokens that each block returns, given its number, by others within the context."""

        def make_hook(number: int) -> Any:
            def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
                if isinstance(output, tuple):  # those of transformers return more than tokens
                    return (change(number, output[0]), *output[1:])
                return change(number, output)

            return hook

        blocks = enumerate(self.blocks)
        handles = [self.source.get_submodule(name).register_forward_hook(make_hook(number)) for number, name in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _crop_center(x: Tensor) -> Tensor:
    """Return the central part of images, resized to their size."""
    height, width = (max(1, round(CROP * side)) for side in x.shape[2:])
    top, left = round((x.shape[2] - height) / 2), round((x.shape[3] - width) / 2)
    return F.interpolate(x[:, :, top : top + height, left : left + width], x.shape[2:], mode="bilinear")


def _regularize(covariance: Tensor) -> Tensor:
    return covariance + MIN_VARIANCE * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)


def _factor(covariance: Tensor, exponent: float) -> Tensor:
    """Return F (..., g, g) of which F Fᵀ is a power of symmetric positive matrices; an overflow counts as zero."""
    values, vectors = torch.linalg.eigh(covariance.nan_to_num(posinf=0.0, neginf=0.0))
    least = MIN_VARIANCE if exponent < 0 else 0.0
    found: Tensor = vectors * values.clamp_min(least).pow(exponent / 2).unsqueeze(-2)
    return found
