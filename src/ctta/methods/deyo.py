"""DeYO: entropy minimization over samples whose prediction depends on the shape of the object."""

import math
from functools import partial
from typing import ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_choice, check_each, check_fraction, check_non_negative
from ctta.errors import InputError
from ctta.functional import EntropyKind, call_on_selected, confidence, entropy, masked_mean, reliability_weights
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.surgery import resize
from ctta.optim import OptimizerFactory

Destruction = Literal["patches", "pixels", "occlusion"]
DESTRUCTIONS: tuple[Destruction, ...] = get_args(Destruction)
GRID = 4  # patches along each side of an image


def destroy_shape(x: Tensor, how: Destruction, generator: torch.Generator) -> Tensor:
    """Return a copy of images (N, C, H, W) with their shapes destroyed.

    The patches of a grid are shuffled differently in each image, pixels in all images alike; or the mean of an image
    covers its center, half of each side. An image is shuffled alike on any number of processes.
    """
    height, width = x.shape[2:]
    if how == "occlusion":
        x, top, left = x.clone(), height // 4, width // 4
        x[:, :, top : top + height // 2, left : left + width // 2] = x.mean((2, 3), keepdim=True)
        return x
    if how == "pixels":
        order = torch.randperm(height * width, generator=generator).to(x.device)
        return x.flatten(2)[:, :, order].view_as(x)
    sides = (math.ceil(height / GRID) * GRID, math.ceil(width / GRID) * GRID)
    patches = (
        resize(x, sides).unfold(2, sides[0] // GRID, sides[0] // GRID).unfold(3, sides[1] // GRID, sides[1] // GRID)
    )
    num_images = current_reducer().total_count(len(x))
    draws = torch.rand(num_images, GRID**2, generator=generator, dtype=torch.float64)
    order = current_reducer().local(draws).argsort(1).to(x.device)
    patches = patches.flatten(2, 3)[torch.arange(len(x)).unsqueeze(1), :, order]  # (N, patches, C, h, w)
    rows = patches.unflatten(1, (GRID, GRID)).permute(0, 3, 1, 4, 2, 5)
    return resize(rows.reshape(len(x), x.shape[1], *sides), (height, width))


class DeYO(StudentModel):
    """Minimize the entropy of confident samples whose confidence drops when their object is destroyed.

    A sample counts if its entropy is low and the probability of its class drops when the object's shape is destroyed.

    Args:
        net: A network for images with normalization layers of any kind.
        select_below: The entropy below which a sample counts, as a fraction of ln C.
        weight_below: The entropy at which the weight exp(margin - H) is 1, as a fraction of ln C.
        min_drop: The drop in probability that a sample needs. The authors use 0.3 for i.i.d. streams and 0.2 for wild
            ones, public benchmarks 0.2.
        destroy: How to destroy the shape: shuffle ``"patches"`` of a 4 x 4 grid, differently in each image; shuffle
            ``"pixels"``, in all images alike; or an ``"occlusion"`` of half the sides by the image's mean.
        entropy: Which entropy to minimize; ``"come"`` is COME's.
        skip_top: Whether to leave out the layers nearest to the output, as the authors do.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)``.
        seed: The seed of the shuffles.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = DeYO(net)(torch.rand(16, 3, 8, 8))

    Reference: Lee et al., "Entropy is not enough for test-time adaptation: from the perspective of disentangled
    factors", ICLR 2024.
    """

    info = MethodInfo("DeYO", "Lee et al., ICLR 2024", "norm layers but the top", "up to 2", 1, 2, labels_pixels=False)
    checks_values_late = True
    check_settings: ClassVar = {"select_below": 0.99, "min_drop": 0.0}

    def __init__(
        self,
        net: nn.Module,
        *,
        select_below: float = 0.5,
        weight_below: float = 0.4,
        min_drop: float = 0.2,
        destroy: Destruction = "patches",
        entropy: EntropyKind = "softmax",
        skip_top: bool = True,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_each(check_non_negative, select_below=select_below, weight_below=weight_below)
        check_fraction("min_drop", min_drop)
        check_choice("destroy", destroy, DESTRUCTIONS)
        check_choice("entropy", entropy, ("softmax", "come"))
        self.select_below, self.weight_below, self.min_drop = select_below, weight_below, min_drop
        self.destroy, self.entropy, self.skip_top = destroy, entropy, skip_top
        self.student = self.copy_of_source()
        self.train_norms_(self.student, skip_top=skip_top)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.require_image_logits(logits)
        if x.ndim != 4:
            raise InputError(f"DeYO needs images (N, C, H, W), got a batch of shape {tuple(x.shape)}")
        entropies, scale = entropy(logits, self.entropy), math.log(logits.shape[1])
        reliable = entropies.detach() < self.select_below * scale
        drop = self._measure_drop(x, logits.detach(), reliable)
        selected = reliable & (drop > self.min_drop)
        weights = reliability_weights(entropies, self.weight_below * scale) + drop.exp()
        loss = masked_mean(entropies * weights, selected)
        self.minimize(loss, selected=selected, confidence=confidence(logits.detach()).mean())
        return logits

    @torch.no_grad()
    def _measure_drop(self, x: Tensor, logits: Tensor, reliable: Tensor) -> Tensor:
        """Return how much less probable the predicted class of each reliable image is in the destroyed image."""
        if not current_reducer().any(reliable):
            return torch.zeros_like(reliable, dtype=logits.dtype)
        destroyed = call_on_selected(self.student, destroy_shape(x, self.destroy, self.generator("shuffle")), reliable)
        labels = logits.argmax(1, keepdim=True)
        return (logits.softmax(1) - destroyed.softmax(1)).gather(1, labels).squeeze(1)
