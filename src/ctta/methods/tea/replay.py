"""A buffer of generated images, from which sampling continues in the next step."""

import torch
from torch import Tensor

from ctta.core.parallel import current_reducer
from ctta.core.state import LazyModule
from ctta.core.validation import check_integer
from ctta.errors import InputError


class ReplayBuffer(LazyModule):
    """A fixed number of images, uniform in [-1, 1] at first; the first batch decides their size.

    On several processes all of them hold the same buffer.

    Args:
        capacity: The number of images.
    """

    images: Tensor

    @torch.inference_mode(False)
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = check_integer("buffer_size", capacity, 1)
        self.register_lazy_buffer("images", capacity, ...)

    def draw(self, x: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw as many images as a batch has, of which a random fraction is drawn anew from [-1, 1].

        Args:
            x: The local rows of the batch.
            fraction: The probability of each image to be drawn anew.
            generator: A generator on the CPU.

        Returns:
            The local rows of the images; the position in the buffer of every image of the batch; and the buffer, of
            which this object takes over the new images with :meth:`write_`.
        """
        batch, size = current_reducer(), x.shape[1:]
        stored = self.images if self.is_allocated else draw_uniform(self.capacity, x, generator)
        count = batch.total_count(len(x))
        places = torch.randint(self.capacity, (count,), generator=generator)
        is_new = torch.rand(count, generator=generator, dtype=torch.float64) < fraction
        fresh = draw_uniform(count, x, generator)
        images = torch.where(is_new.to(x.device).view(-1, *[1] * len(size)), fresh, stored[places.to(x.device)].to(x))
        return batch.local(images), places, stored

    @torch.no_grad()
    def write_(self, stored: Tensor, places: Tensor, images: Tensor) -> None:
        """Store images; of several with one position the last stays.

        Args:
            stored: The buffer that :meth:`draw` returned.
            places: The positions that it returned.
            images: The local rows of the images.
        """
        if not self.is_allocated:
            self.allocate_("images", stored)
        rows = {place: row for row, place in enumerate(places.tolist())}
        at, of = torch.tensor([[*rows], [*rows.values()]], device=images.device)
        self.images[at] = current_reducer().gather(images)[of].to(self.images.dtype)

    def check_size(self, x: Tensor) -> None:
        """Raise an InputError unless a batch has images of the size in the buffer."""
        if self.is_allocated and x.shape[1:] != self.images.shape[1:]:
            raise InputError(
                f"the replay buffer holds images of shape {tuple(self.images.shape[1:])}, and this batch has "
                f"{tuple(x.shape[1:])}: give all images of a stream the same size"
            )


def draw_uniform(count: int, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of the size, dtype and device of a batch's, uniform in [-1, 1]."""
    images = torch.rand((count, *x.shape[1:]), generator=generator, dtype=x.dtype)
    return images.mul_(2).sub_(1).to(x.device)
