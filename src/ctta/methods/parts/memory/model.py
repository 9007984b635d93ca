"""Methods that learn from a memory of past images."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_reducer, replicated
from ctta.core.state import remember_buffers
from ctta.errors import InputError
from ctta.methods.parts.memory.memories import Memory


class MemoryModel(AdaptiveModel):
    """A method that predicts, remembers the images, and learns from its memory at regular intervals.

    A subclass sets ``memory`` and ``update_every``, and implements :meth:`predict_step` and :meth:`update`. The whole
    batch is predicted before it is remembered. An update is due whenever another ``update_every`` images have arrived,
    also within a batch; then only the images up to there are in the memory.
    """

    check_settings: ClassVar = {"memory_size": 8, "update_every": 6}  # the memory of the contract suite has to evict
    memory: Memory
    #: The number of images between two updates; None for one update per batch.
    update_every: int | None = None

    def update(self, number: int) -> bool:
        """Learn from the memory.

        Args:
            number: The number of updates before it in this step; distinguishes their random draws.

        Returns:
            Whether to keep what it did to buffers. If not, because the step was skipped, norm statistics return to what
            they were, and the memory forgets the images since the last update.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither update() nor an adapt_step() of its own")

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits = self.predict_step(x)
        self.remember_(x, logits, self.update)
        return logits

    def remember_(self, x: Tensor, logits: Tensor, update: Callable[[int], bool]) -> None:
        """Take a predicted batch into the memory, and call ``update`` whenever one is due.

        Args:
            x: The local rows of the batch.
            logits: Their predictions.
            update: As :meth:`update`.
        """
        batch, generator = current_reducer(), self.generator("memory")
        images, predictions = batch.gather(x), batch.gather(logits.detach())
        state = [module for name, module in self.named_children() if name != "source"]
        start = number = 0
        with replicated():
            while start < len(images):
                num_new = int(self.memory.num_seen) % self.update_every if self.update_every else 0
                last_update = int(self.memory.num_seen) - num_new
                missing = (self.update_every or len(images)) - num_new
                stop = min(start + missing, len(images))
                restore_buffers = remember_buffers(*state) if stop - start == missing else None
                self.memory.add_(images[start:stop], predictions[start:stop], generator)
                if restore_buffers is not None and not update(number):
                    restore_buffers()
                    self.memory.forget_since_(last_update)  # also those of earlier batches, or it would fail again
                start, number = stop, number + 1

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        expected = self.memory.images.shape[1:]
        if self.memory.is_allocated and x.shape[1:] != expected:
            raise InputError(
                f"the memory holds inputs of shape {tuple(expected)}, and this batch has {tuple(x.shape[1:])}: give "
                "all images of a stream the same size"
            )
