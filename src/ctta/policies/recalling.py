"""A policy that remembers what a method learned in each domain, and returns to it when the domain comes back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_reducer
from ctta.core.steps import Policy
from ctta.core.validation import check_fraction, check_integer, check_non_negative
from ctta.errors import ConfigError
from ctta.functional import at_least_float32, confidence, entropy, mean_probabilities
from ctta.nn import find_norm_layers, use_running_statistics_
from ctta.nn.surgery import copy_sharing_tensors

NUM_OCTAVES = 4
#: Numbers that describe an image: means and deviations of three channels, and the energy in each octave.
NUM_FEATURES = 6 + NUM_OCTAVES
NONE = -1  # no domain
HORIZON = 1000  # images that the description of a domain remembers
#: How far batches of one domain scatter: the squared distance of n images is at most about NOISE / n.
NOISE = 2.0
#: How much more predictions must tell, in nats, before a model returns to what it has learned in a domain.
MARGIN = 0.01


class DomainMemory(nn.Module):
    """The state of :class:`Recall`: what inputs of each domain look like, and the norm layers that were learned there.

    Args:
        size: Number of domains.
        tensors: What is remembered of each.
    """

    means: Tensor
    covariances: Tensor
    counts: Tensor
    used_at: Tensor
    current: Tensor

    def __init__(self, size: int, tensors: list[Tensor]) -> None:
        super().__init__()
        like = tensors[0]
        for name, shape in (("means", (NUM_FEATURES,)), ("covariances", (NUM_FEATURES,) * 2), ("counts", ())):
            self.register_buffer(name, like.new_zeros(size, *shape))
        for name in ("used_at", "current"):
            values = torch.full((size,) if name == "used_at" else (), NONE, device=like.device)
            self.register_buffer(name, values)
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"learned{number}", torch.zeros_like(tensor).expand(size, *tensor.shape).clone())

    @property
    def learned(self) -> list[Tensor]:
        """What was learned, (size, ...) each."""
        return [buffer for name, buffer in self.named_buffers() if name.startswith("learned")]

    def measure_distances(self, mean: Tensor) -> Tensor:
        """Return how far the mean features of a batch are from each domain, in its standard deviations."""
        variances = torch.diag_embed(at_least_float32(self.covariances).diagonal(dim1=1, dim2=2))
        # Few images say little about how features depend on each other.
        share = (NUM_FEATURES / (NUM_FEATURES + at_least_float32(self.counts))).view(-1, 1, 1)
        covariances = torch.lerp(at_least_float32(self.covariances), variances, share)
        covariances = covariances + 0.01 * variances + 1e-6 * torch.eye(NUM_FEATURES).to(variances)
        offsets = mean.to(covariances) - at_least_float32(self.means)
        squares = (offsets * torch.linalg.solve(covariances, offsets)).sum(1) / NUM_FEATURES
        return torch.where(self.counts > 0, squares, torch.inf).sqrt()

    def describe_(self, slot: int, features: Tensor) -> None:
        """Let a batch count for what inputs of a domain look like."""
        mean, count = features.mean(0), min(float(self.counts[slot]), HORIZON)
        covariance = (features - mean).T @ (features - mean) / len(features)
        share = len(features) / (count + len(features))
        self.means[slot] = self.means[slot].lerp(mean.to(self.means), share)
        self.covariances[slot] = self.covariances[slot].lerp(covariance.to(self.means), share)
        self.counts[slot] = count + len(features)


@dataclass(frozen=True, repr=False)
class Recall(Policy):
    """Remember norm layers and statistics by domain, and return to them when inputs look like that domain again.

    After each batch, simple statistics of the inputs tell whether it belongs to the current domain. If it does not, the
    nearest domain that is remembered is returned to, from the next batch on; if none is near enough, the method goes on
    as it is, and a new domain begins. What is remembered is part of the model, and saved with it;
    :class:`ctta.StateLibrary` carries it to other models.

    Attributes:
        num: How many domains to remember; of more, the one that was not seen for longest is forgotten.
        tolerance: How far the inputs may be from a domain that they belong to, in its standard deviations, besides what
            the size of the batch explains.
        max_confidence: Mean confidence of the source, as it was trained, above which nothing is returned to: images
            that it knows may look like those of a domain, and gain nothing. With 1 there is no such limit.
    """

    name = "recall"
    num: int = 16
    tolerance: float = 0.2
    max_confidence: float = 0.9

    def __post_init__(self) -> None:
        check_integer("num", self.num, 1)
        check_non_negative("tolerance", self.tolerance)
        check_fraction("max_confidence", self.max_confidence)

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        tensors = [getattr(module, name) for module, name in find_remembered(model)]
        if not tensors:
            raise ConfigError(f"recall needs norm layers, and those of {type(model).__name__} have no parameters")
        return DomainMemory(self.num, tensors)

    @override
    @torch.no_grad()
    def after_step(self, model: AdaptiveModel, state: DomainMemory, x: Tensor, logits: Tensor) -> None:
        if model.last_step is not None and model.last_step.skipped:
            return
        features = current_reducer().gather(describe_images(x))
        if not features.isfinite().all():
            return
        slot = self.find_slot(state, features)
        if slot != NONE and slot != int(state.current):
            if self.max_confidence == 1 or measure_source_confidence(model, x) <= self.max_confidence:
                # A stream that starts has learned from this batch only, which must not count for it in a comparison.
                recall_if_better_(model, state, slot, x, rival=model.fork() if state.current == NONE else model)
        elif slot == NONE:
            slot = int(state.used_at.argmin())  # an empty one, or that of the longest ago
            state.counts[slot] = 0
        state.describe_(slot, features)
        remember_(model, state, slot)
        state.current.fill_(slot)
        state.used_at[slot] = state.used_at.max() + 1

    def find_slot(self, state: DomainMemory, features: Tensor) -> int:
        """Return the domain that a batch belongs to: the current one if it may, else the nearest; -1 if none is near.

        Args:
            state: What is remembered.
            features: Features of the images (N, :data:`NUM_FEATURES`).

        Returns:
            The index of the domain.
        """
        excess = self._measure_excess(state, features.mean(0), len(features))
        current = int(state.current)
        if current != NONE and excess[current] <= 0:
            return current
        nearest = int(excess.argmin())
        return nearest if excess[nearest] <= 0 else NONE

    def is_near(self, state: DomainMemory, slot: int, mean: Tensor, count: Tensor) -> bool:
        """Return whether other images belong to a domain.

        Args:
            state: What is remembered.
            slot: Index of the domain.
            mean: Mean features of the images.
            count: How many they are.

        Returns:
            Whether they are near enough.
        """
        return bool(self._measure_excess(state, mean, float(count))[slot] <= 0)

    def _measure_excess(self, state: DomainMemory, mean: Tensor, count: float) -> Tensor:
        """Return by how much images are too far from each domain to belong to it; at most 0 if they may."""
        known = at_least_float32(state.counts).clamp_min(1)
        # The last factor is for the covariance of few images, which underestimates how far others scatter.
        noise = NOISE * (1 / count + 1 / known) * (1 + 2 * NUM_FEATURES / known)
        return state.measure_distances(mean).square() - noise - self.tolerance**2


def find_remembered(model: AdaptiveModel) -> list[tuple[nn.Module, str]]:
    """Return the norm parameters and statistics of the networks that a method adapts: each module and attribute."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for network in ("student", "teacher"):
        net = getattr(model, network, None)
        if isinstance(net, nn.Module):
            for layer in sorted(find_norm_layers(net)):
                for module in _list_parts(net.get_submodule(layer)):
                    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                        if tensor.is_floating_point():
                            found.setdefault(id(tensor), (module, name))
    return list(found.values())


def _list_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer, and the hooks that hold its statistics."""
    yield layer
    yield from (hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, nn.Module))


@torch.no_grad()
def remember_(model: AdaptiveModel, state: DomainMemory, slot: int) -> None:
    """Keep the norm layers and statistics of a model as those of a domain."""
    for (module, name), learned in zip(find_remembered(model), state.learned, strict=True):
        learned[slot] = getattr(module, name)


@torch.no_grad()
def recall_(model: AdaptiveModel, state: DomainMemory, slot: int) -> None:
    """Give a model the norm layers and statistics of a domain."""
    for (module, name), learned in zip(find_remembered(model), state.learned, strict=True):
        getattr(module, name).copy_(learned[slot])


@torch.no_grad()
def recall_if_better_(model: AdaptiveModel, state: DomainMemory, slot: int, x: Tensor, *, rival: AdaptiveModel) -> None:
    """Give a model what was learned in a domain, if its predictions for a batch then tell more than those of a rival.

    How much predictions tell is the mutual information between images and classes: sure of each image, and diverse over
    the batch. What a method has learned since then, in other domains, may be worth more than a return.

    Args:
        model: The model.
        state: What is remembered.
        slot: Index of the domain.
        x: The batch.
        rival: The model as it is, or a new one.
    """
    present = [getattr(module, name).detach().clone() for module, name in find_remembered(model)]
    information = measure_information(rival.predict_step(x))
    recall_(model, state, slot)
    if not measure_information(model.predict_step(x)) > information + MARGIN:  # also if it is not a number
        for (module, name), tensor in zip(find_remembered(model), present, strict=True):
            getattr(module, name).copy_(tensor)


@torch.no_grad()
def measure_source_confidence(model: AdaptiveModel, x: Tensor) -> Tensor:
    """Return the mean confidence of the source in a batch, with the statistics that it was trained with.

    Args:
        model: The model.
        x: The batch.
    """
    source = copy_sharing_tensors(model.source)
    use_running_statistics_(source)
    mean: Tensor = current_reducer().mean(confidence(source(x)).mean())
    return mean


def measure_information(logits: Tensor) -> Tensor:
    """Return the mutual information between the elements of a batch and their predicted classes, in nats."""
    marginal = mean_probabilities(logits)
    conditional = current_reducer().mean(entropy(logits).mean())
    information: Tensor = -torch.special.xlogy(marginal, marginal).sum() - conditional
    return information


def describe_images(x: Tensor) -> Tensor:
    """Return simple statistics of each input, which tell domains apart: brightness, contrast, color and sharpness.

    Args:
        x: Images (N, C, H, W), or other inputs, of which only mean and deviation count.

    Returns:
        Features (N, :data:`NUM_FEATURES`); zero for what an input does not have.
    """
    x = at_least_float32(x)
    channels = x[:, :3] if x.ndim == 4 else x.flatten(1).unsqueeze(1).unsqueeze(1)
    spread = channels.var((2, 3), correction=0).sqrt()
    features = [channels.mean((2, 3)), spread]
    gray = channels.mean(1, keepdim=True)
    for _ in range(NUM_OCTAVES):
        if x.ndim != 4 or min(gray.shape[2:]) < 2:
            break
        coarse = F.avg_pool2d(gray, 2)
        detail = gray - F.interpolate(coarse, size=gray.shape[2:])
        features.append(detail.square().mean((1, 2, 3)).add(1e-8).sqrt().log().unsqueeze(1))
        gray = coarse
    found = torch.cat(features, 1)
    return F.pad(found, (0, NUM_FEATURES - found.shape[1]))
