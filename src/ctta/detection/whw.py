"""WHW: align features through small adaptors, and only when the stream has moved."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.parallel import read
from ctta.core.updates import Policy
from ctta.core.validation import check_integer, check_non_negative
from ctta.detection.boxes import unpack
from ctta.detection.detector import Detector
from ctta.detection.model import DetectionModel
from ctta.detection.source_stats import pool_objects, regularize
from ctta.errors import ConfigError
from ctta.functional import at_least_float32
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.norm import NetworkHook
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats

#: How many values the running mean of the loss remembers.
LOSS_DECAY = 0.99
#: Number of batches after which the network is adapted, or inspected after a pause, in any case.
PERIOD = 10
#: The rarest class weighs at most the square of this, and a class as frequent as any the square of SMALL_WEIGHT.
MAX_WEIGHT, SMALL_WEIGHT = 10.0, 0.01
#: Terms from this size on are taken for errors, and left out.
MAX_TERM = 1e5


class Adaptor(nn.Module):
    """Two pointwise convolutions beside one of a network's, which start as zero.

    Args:
        conv: The convolution of the network.
        reduction: How many times fewer channels there are between the two.
    """

    def __init__(self, conv: nn.Conv2d, reduction: int) -> None:
        super().__init__()
        place = {"device": conv.weight.device, "dtype": conv.weight.dtype}
        width = max(1, conv.in_channels // reduction)
        self.down = skip_init(nn.Conv2d, conv.in_channels, width, 1, **place)  # without torch's global generator
        self.up = skip_init(nn.Conv2d, width, conv.out_channels, 1, **place)
        self._input: Tensor | None = None

    def initialize_(self, generator: torch.Generator) -> None:
        """Draw the first weights, with which the adaptor adds nothing."""
        weight = torch.empty(self.down.weight.shape)
        self.down.weight.data.copy_(nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator))
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            assert tensor is not None
            nn.init.zeros_(tensor)

    @override
    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x).relu())
        return added

    def attach_(self, net: nn.Module, site: tuple[str, str]) -> None:
        """Add to the output of a norm layer what the adaptor makes of the input of the convolution before it."""
        net.get_submodule(site[0]).register_forward_pre_hook(self.keep)
        net.get_submodule(site[1]).register_forward_hook(self.add)

    def keep(self, conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the input of the convolution."""
        self._input = inputs[0]

    def add(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Add to the output of the norm layer."""
        assert self._input is not None, "the convolution comes before its norm layer"
        x, self._input = self._input, None
        total: Tensor = output + self(x)
        return total


class AdaptorHook(NetworkHook, Adaptor):
    """An adaptor of the student, which the method holds beside it."""


@dataclass(frozen=True, repr=False)
class ClipGradient(Policy):
    """Scale gradients down to a norm."""

    name: ClassVar[str] = "clip_gradient"
    max_norm: float

    @override
    def before_update(self, model: Any, state: Any, x: Tensor) -> None:
        nn.utils.clip_grad_norm_(model.adaptors.parameters(), self.max_norm)


class WHW(DetectionModel, StudentModel):
    """Align the features of images and objects with the source's through adaptors, where and when it is needed.

    Means of the features follow the stream, and adaptors beside the network's convolutions are trained until those
    means are the source's: of every map, and of the objects of every class, the rarer the more. Once the distance of
    the images is small and does not grow, the network only predicts, and looks again after ten batches.

    The authors take features of objects from the region head of a Faster R-CNN. Here they are means of the finest map
    within boxes with scores of at least 0.5, so that every kind of detector has some.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows, with convolutions that
            :meth:`ctta.detection.Detector.find_adaptor_sites` finds.
        source_stats: Of :func:`ctta.detection.detection_stats`.
        optimizer: A factory of the optimizer; the default is the authors' for COCO.
        memory: How many images, or objects, the means remember.
        reduction: How many times fewer channels an adaptor has inside.
        tolerance: Adapt above this many times the distance that two sets of source images have.
        growth: Adapt above this many times the mean distance so far.
        always: Whether to adapt on every batch, without these two conditions.
        max_norm: The gradient's norm is clipped to this.

    Reference: Yoo et al., "What, how, and when should object detectors update in continually changing test domains?",
    CVPR 2024.
    """

    info = MethodInfo(
        "WHW",
        paper="Yoo et al., CVPR 2024",
        trains="adaptors",
        forward_passes=2,
        backward_passes=1,
        num_networks=2,
        needs_source_data=True,
        starts_random=True,
    )
    student: Detector
    num_paused: int
    mean_loss: Tensor
    object_means: Tensor
    object_counts: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4),
        memory: int = 128,
        reduction: int = 32,
        tolerance: float = 1.1,
        growth: float = 1.05,
        always: bool = False,
        max_norm: float = 5.0,
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_integer("memory", memory, 1)
        check_integer("reduction", reduction, 1)
        for name, value in {"tolerance": tolerance, "growth": growth, "max_norm": max_norm}.items():
            check_non_negative(name, value)
        self.memory, self.reduction, self.tolerance, self.growth = memory, reduction, tolerance, growth
        self.always, self.max_norm = always, max_norm
        names = ("level.mean", "level.covariance", "level.divergence", "object.mean", "object.covariance")
        available = set(source_stats.names) if isinstance(source_stats, SourceStats) else set(names)
        stats = self.use_source_stats(source_stats, *(name for name in names if "level" in name or name in available))
        for number, mean in stats.by_name("level.mean").items():
            self.register_buffer(f"level_mean_{number}", mean.clone())
        self._classes = [int(label) for label in stats.by_name("object.mean")]
        means = list(stats.by_name("object.mean").values())
        self.register_buffer("object_means", torch.stack(means) if means else torch.zeros(0, 1))
        self.register_buffer("object_counts", torch.zeros(len(means)))
        self.register_buffer("mean_loss", torch.zeros(()))
        self.register_counter("num_paused")
        self.sites = self.source.find_adaptor_sites()
        if not self.sites:
            raise ConfigError(
                "WHW found no convolution to add adaptors to: override find_adaptor_sites of the detector"
            )
        self.student = self.copy_of_detector().requires_grad_(False)
        self.adaptors = nn.ModuleList()
        for site in self.sites:
            conv = self.student.get_submodule(site[0])
            assert isinstance(conv, nn.Conv2d), "find_adaptor_sites returns convolutions first"
            adaptor = AdaptorHook(conv, reduction)
            adaptor.initialize_(self.generator(f"adaptor {site[0]}"))
            adaptor.attach_(self.student, site)
            self.adaptors.append(adaptor)
        self.optimize(nn.ModuleList([self.student, self.adaptors]), optimizer)
        self.use_policies(ClipGradient(max_norm))

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the adapted network with its adaptors, which are part of it from now on.

        Args:
            batches: Not used: the method leaves the statistics of BatchNorm as they are.
        """
        net = super().deploy()
        net.adaptors = nn.ModuleList()
        for adaptor, site in zip(self.adaptors, self.sites, strict=True):
            conv = net.get_submodule(site[0])
            assert isinstance(conv, nn.Conv2d), "as in the student"
            kept = Adaptor(conv, self.reduction)
            kept.load_state_dict(adaptor.state_dict())
            kept.attach_(net, site)
            net.adaptors.append(kept)
        return net

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        answer = self.predict_step(x)
        is_paused = self.num_paused % PERIOD != 0
        with torch.set_grad_enabled(not is_paused):
            maps = self.student.features(x)
            loss, level_means, is_finite, has_moved = self._compare_levels(maps)
        if is_paused:
            if is_finite:
                self._store_levels_(level_means)
            self.num_paused += 1
            return answer
        if not is_finite:
            self.minimize(loss)  # which skips the step, and counts it
            return answer
        needs_update = self.always or self.num_steps % PERIOD == 0 or has_moved
        self.mean_loss.lerp_(loss.detach().to(self.mean_loss), 1 - LOSS_DECAY)
        self.num_paused = 0 if needs_update else 1
        if not needs_update:
            self._store_levels_(level_means)
            return answer
        of_objects, means, counts = self._compare_objects(maps, answer, x)
        loss = loss + of_objects
        if loss.requires_grad and self.minimize(loss):  # not if every term was too large
            self._store_levels_(level_means)
            self.object_means.copy_(means)
            self.object_counts.copy_(counts)
        return answer

    def _compare_levels(self, maps: list[Tensor]) -> tuple[Tensor, list[Tensor], bool, bool]:
        """Compare images with the source's.

        Returns:
            Their distance, the new means of the maps, whether it is finite, and whether it is large or has grown.
        """
        stats, terms, means = self.source_stats.tensors, [], []
        for number, each in enumerate(maps):
            vectors = at_least_float32(each).mean((2, 3))
            mean = self._move(self.get_buffer(f"level_mean_{number}"), vectors)
            terms.append(_divergence(mean - stats[f"level.mean/{number}"], stats[f"level.covariance/{number}"]))
            means.append(mean.detach())
        values, zero = torch.stack(terms).detach(), terms[0].new_zeros(())
        total = sum(values.masked_fill(values >= MAX_TERM, 0.0), zero)
        noise = sum(self.source_stats.by_name("level.divergence").values(), zero)
        has_moved = (total > 2 * self.tolerance * noise) | (total / (self.mean_loss + 1e-7) > self.growth)
        values, flags = read(values, torch.stack([total.isfinite(), has_moved]))
        is_used = [not value >= MAX_TERM for value in values.tolist()]
        loss = sum([term for term, used in zip(terms, is_used, strict=True) if used], zero)
        means = [
            mean if used else self.get_buffer(f"level_mean_{number}")
            for number, (mean, used) in enumerate(zip(means, is_used, strict=True))
        ]
        return loss, means, *flags.tolist()

    @torch.no_grad()
    def _store_levels_(self, means: list[Tensor]) -> None:
        for number, mean in enumerate(means):
            self.get_buffer(f"level_mean_{number}").copy_(mean)

    def _compare_objects(self, maps: list[Tensor], answer: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distance of the objects from the source's, their new means and their counts by class."""
        stats, loss = self.source_stats.tensors, at_least_float32(maps[0]).new_zeros(())
        features, labels = pool_objects(maps, unpack(*read(answer)), x.shape[2:])
        found = torch.tensor([int((labels == label).sum()) for label in self._classes])
        counts, means = self.object_counts + found.to(self.object_counts), self.object_means.clone()
        compared: list[tuple[int, Tensor, Tensor]] = []
        for index, label in enumerate(self._classes):
            if not found[index]:
                continue
            rows = (labels == label).nonzero()[:, 0].to(features.device, non_blocking=True)
            mean = self._move(self.object_means[index], features[rows])
            term = _divergence(mean - stats[f"object.mean/{label}"], stats[f"object.covariance/{label}"])
            compared.append((index, mean, term))
        (values,) = read(torch.stack([term for _, _, term in compared])) if compared else (torch.empty(0),)
        for (index, mean, term), value in zip(compared, values.tolist(), strict=True):
            if value < MAX_TERM:
                weight = ((counts.max() / counts[index]).log() + SMALL_WEIGHT).clamp_max(MAX_WEIGHT).square()
                loss = loss + weight * term
                means[index] = mean.detach()
        return loss, means, counts

    def _move(self, mean: Tensor, vectors: Tensor) -> Tensor:
        """Return a mean that vectors have moved, by at most all of the way to theirs."""
        share = min(1.0, len(vectors) / self.memory)
        return mean.lerp(vectors.mean(0), share)


def _divergence(difference: Tensor, covariance: Tensor) -> Tensor:
    """Return half of the symmetric divergence of two Gaussians of one covariance, from their means' difference."""
    solved, _ = torch.linalg.solve_ex(regularize(covariance), difference)  # without reading whether it is regular
    halved: Tensor = 0.5 * difference @ solved
    return halved
