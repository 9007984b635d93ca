"""Images whose shapes are destroyed and whose textures and colors are kept, as DeYO compares them."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ctta.core.parallel import current_reducer
from ctta.nn.surgery import resize

Destruction = Literal["patches", "pixels", "occlusion"]
DESTRUCTIONS: tuple[Destruction, ...] = get_args(Destruction)
GRID = 4  # patches along each side of an image


def destroy_shape(x: Tensor, how: Destruction, generator: torch.Generator) -> Tensor:
    """Return a copy of images with their shapes destroyed.

    Args:
        x: Images (N, C, H, W).
        how: Shuffle the ``"patches"`` of a 4 x 4 grid, differently in each image; shuffle the ``"pixels"``, in all
            images alike; or cover the center, half of each side, by the mean of the image (``"occlusion"``).
        generator: A generator on the CPU; an image is shuffled alike on any number of processes.

    Returns:
        Images (N, C, H, W).
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
