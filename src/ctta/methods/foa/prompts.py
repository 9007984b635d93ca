"""Prompts of a vision transformer: tokens beside its own, and how they change its class token.

>>> from ctta.nn.heads import record_features_
>>> from ctta.testing.networks import BlockViT
>>> net = BlockViT(width=16)
>>> record_features_(net, "head")
>>> prompts = draw_prompts(net, 3, torch.Generator().manual_seed(0))
>>> features, tokens, logits = PromptSite.find(net, "head").run(net, torch.rand(2, 3, 16, 16), prompts)
>>> features.shape, tokens.shape  # two blocks of 16 features
(torch.Size([2, 16]), torch.Size([2, 32]))
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ctta.core.state import LazyModule
from ctta.core.validation import check_each, check_fraction, check_integer
from ctta.functional import at_least_float32
from ctta.nn.heads import features_and_logits, is_linear, layer_weight, shift_features_
from ctta.nn.vit import change_tokens, find_block_norms, find_blocks, find_class_token
from ctta.source_stats import SourceStats


def draw_prompts(net: nn.Module, num_prompts: int, generator: torch.Generator) -> Tensor:
    """Draw tokens (num_prompts, d) like the class token, uniformly as Xavier's rule has it for a layer from patches."""
    check_integer("num_prompts", num_prompts, 1)
    token = net.get_parameter(find_class_token(net)).detach()
    embedding = next(module for module in net.modules() if isinstance(module, nn.Conv2d) or is_linear(module))
    bound = (6 / (layer_weight(embedding)[0].numel() + token.shape[2])) ** 0.5
    drawn = torch.rand(num_prompts, token.shape[2], generator=generator, dtype=torch.float64)
    return drawn.mul_(2 * bound).sub_(bound).to(token)


def insert_tokens(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens (N, T + P, d): prompts (P, d), the same for every image, after the class token of (N, T, d)."""
    own = prompts.to(tokens).expand(tokens.shape[0], -1, -1)  # not len(), which an export would take for a constant
    return torch.cat([tokens[:, :1], own, tokens[:, 1:]], 1)


def _insert_own_prompts(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Insert the prompts that a block has as a buffer into the tokens that it gets, as a forward pre-hook."""
    return (insert_tokens(block.get_buffer("prompts"), inputs[0]), *inputs[1:])


@dataclass(frozen=True)
class PromptSite:
    """Where prompts enter a network, and where its class token is compared with that of source images.

    Attributes:
        block: The first block.
        layers: The norm layers between two blocks, of :func:`ctta.nn.vit.find_block_norms`. The features before the
            classifier follow them.
        head: The classifier.
    """

    #: What :meth:`distance_to_source` needs.
    STATISTICS: ClassVar = ("feature_mean", "feature_variance", "layer_outputs.mean", "layer_outputs.variance")

    block: str
    layers: tuple[str, ...]
    head: str

    @classmethod
    def find(cls, net: nn.Module, head: str) -> Self:
        """Find the places in a vision transformer; raise a ConfigError for another kind of network."""
        return cls(find_blocks(net)[0], find_block_norms(net), head)

    def run(self, net: nn.Module, x: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predict a batch with prompts (P, d); the network records features.

        Returns:
            The features before the classifier (N, d), the class token at all layers and these features, end to end
            (N, L d), and the logits.
        """
        insert = partial(insert_tokens, prompts)
        with change_tokens(net, self.block, insert), _record_class_tokens(net, self.layers) as tokens:
            features, logits = features_and_logits(net, x)
        return features, at_least_float32(torch.cat([*tokens, features], 1)), logits

    def distance_to_source(self, tokens: Tensor, stats: SourceStats) -> Tensor:
        """Return the squared distance of means and deviations of class tokens (N, L d) from those of source images."""
        std, mean = torch.std_mean(tokens, 0, correction=min(1, len(tokens) - 1))
        means, variances = stats.by_name("layer_outputs.mean"), stats.by_name("layer_outputs.variance")
        source_mean = torch.cat([*(means[layer] for layer in self.layers), stats["feature_mean"]])
        source_variance = torch.cat([*(variances[layer] for layer in self.layers), stats["feature_variance"]])
        correction = stats.num_images / max(stats.num_images - 1, 1)  # those of source images are divided by n
        source_std = at_least_float32(source_variance).mul(correction).sqrt()
        return (std - source_std).square().sum() + (mean - source_mean).square().sum()

    def install_(self, net: nn.Module, prompts: Tensor, shift: Tensor) -> nn.Module:
        """Let a network insert prompts, a new buffer, and add ``shift`` to its features by the bias; return it."""
        block = net.get_submodule(self.block)
        block.register_buffer("prompts", prompts.clone())
        block.register_forward_pre_hook(_insert_own_prompts)
        shift_features_(net, self.head, shift)
        return net


class FeatureShift(LazyModule):
    """Move features by a share of the way from the mean of past batches to that of source images, ``target``.

    ``decay`` is the fraction of itself that the mean of past batches keeps.
    """

    cpu_buffers = ("_is_started",)
    past: Tensor
    target: Tensor
    _is_started: Tensor

    @torch.inference_mode(False)
    def __init__(self, target: Tensor, share: float, decay: float) -> None:
        super().__init__()
        check_each(check_fraction, shift=share, decay=decay)
        self.share, self.decay = share, decay
        self.register_buffer("target", target.clone())
        self.register_buffer("past", target.clone())  # so that nothing moves before the first batch
        self.register_buffer("_is_started", torch.zeros((), dtype=torch.bool))

    @property
    def offset(self) -> Tensor:
        """What is added to features (d)."""
        return self.share * (self.target - self.past)

    def move(self, features: Tensor) -> Tensor:
        """Return the features (N, d), moved."""
        return features + self.offset.to(features)

    @torch.no_grad()
    def update_(self, mean: Tensor) -> None:
        """Take in the mean of a batch (d); the first one is the mean of past batches."""
        self.past.lerp_(mean.to(self.past), 1 - self.decay if self._is_started else 1)
        self._is_started.fill_(True)


@contextmanager
def _record_class_tokens(net: nn.Module, layers: Sequence[str]) -> Iterator[list[Tensor]]:
    """Yield a list that grows by the class token (N, d) that each of the layers returns, in the order of the calls."""
    found: list[Tensor] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], tokens: Tensor) -> None:
        found.append(tokens[:, 0])

    handles = [net.get_submodule(layer).register_forward_hook(record) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
