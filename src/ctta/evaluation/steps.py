"""A step of a model on a batch, and what it costs: passes of the network, and memory in which environment."""

import contextlib
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_call
from ctta.data.streams import Batch, Stream
from ctta.nn.surgery import find_weight

BatchT = TypeVar("BatchT", bound=Batch)

#: Packages that results may depend on; those that are installed are recorded.
PACKAGES = ("ctta", "torch", "numpy", "pillow", "timm", "torchvision", "transformers")
#: A backward pass costs as much as this many forward passes.
BACKWARD_COST = 2
#: Passes are counted over at least this many batches and images, as some methods do not update at every batch.
MIN_BATCHES, MIN_IMAGES = 4, 256


def step_batch(model: AdaptiveModel, x: Tensor, *, adapt: bool = True) -> Tensor:
    """Send a batch on any device through a model; return the logits of this rank's rows.

    Every rank has the whole batch, and takes its rows. Without ``adapt`` they are answered by one pass of the network.
    """
    rows = x[model.coordinator.local_rows(len(x))].to(find_weight(model.source), non_blocking=True)
    return model(rows) if adapt else model.predict_once(rows)


def feed(batches: Iterable[BatchT], device: torch.device) -> Iterator[BatchT]:
    """Yield batches; for an accelerator a thread reads the next one into pinned memory while the device works.

    From there :func:`step_batch` copies it without making the host wait. On the CPU nothing runs beside the model but
    what the stream itself reads ahead.
    """
    if device.type == "cpu":
        yield from batches
        return
    remaining = iter(batches)

    def read() -> BatchT | None:
        batch = next(remaining, None)
        # Not every accelerator has pinned memory: that of MPS is the host's.
        return batch if batch is None or device.type == "mps" else replace(batch, x=batch.x.pin_memory())

    with ThreadPoolExecutor(1, "ctta-feed") as thread:
        pending = thread.submit(read)
        while (batch := pending.result()) is not None:
            pending = thread.submit(read)
            yield batch


@dataclass
class PassCount:
    """Numbers of images that went through networks of one class, and of those whose gradient went back."""

    forward: int = 0
    backward: int = 0


@contextmanager
def count_passes(kind: type[nn.Module]) -> Iterator[PassCount]:
    """Count the images that go through all networks of a class; one that is part of another does not count."""
    count, depth = PassCount(), 0

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal depth
        depth += type(module) is kind

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        nonlocal depth
        if type(module) is not kind:
            return
        depth -= 1
        if depth > 0 or output is None:  # a pass that was broken off does not count
            return
        num_images, is_counted = len(inputs[0]), False
        count.forward += num_images

        def count_backward(gradient: Tensor) -> None:
            nonlocal is_counted
            count.backward += 0 if is_counted else num_images  # once, however many outputs the loss uses
            is_counted = True

        # The logits are extracted after this hook: here the output may still be a dict or an object with several.
        # A loss may also start from the features alone.
        for tensor in (*tree_leaves(output), *(current_call().features or ())):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(count_backward)

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def count_step_ratio(model: AdaptiveModel, stream: Stream) -> float:
    """Return how many plain forward passes a step of a method costs on the first batches of a stream.

    Counted in passes of the network, not measured in seconds, so that it is the same on every machine: a forward pass
    of an image counts 1, a backward pass 2. A fork of the model adapts, and the position of the stream does not change.
    """
    fork = model.fork()
    num_batches = min(len(stream), max(MIN_BATCHES, ceil(MIN_IMAGES / stream.batch_size)))
    num_images = 0
    with count_passes(type(model.source)) as count:
        for number in range(num_batches):
            x = stream.read_batch(number).x
            num_images += len(x)
            step_batch(fork, x)
    costs = model.coordinator.all_gather_object(lambda: count.forward + BACKWARD_COST * count.backward)
    return sum(costs) / num_images


def whole_ratio(ratio: float) -> int:
    """Return how many batches arrive during a step that takes this many times as long as a batch to arrive."""
    return max(1, ceil(ratio))


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, number of threads and operating system, which results depend on, as plain JSON."""
    return {
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _find_version(name))},
        "device": name_device(device),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def name_device(device: torch.device) -> str:
    """Return the name of an accelerator as its driver has it; the type of a device without such a name."""
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class PeakMemory:
    """The peak memory since construction: of the network's device if that counts its memory, else of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counters = device, torch.get_device_module(device)
        if hasattr(self.counters, "max_memory_allocated"):
            self.counters.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or a sandbox
                Path("/proc/self/clear_refs").write_text("5")  # reset the peak of what ran before in this process

    def read_mib(self) -> int | None:
        """Return the peak in MiB; None where the system does not report it, as on Windows."""
        if hasattr(self.counters, "max_memory_allocated"):
            return int(self.counters.max_memory_allocated(self.device)) >> 20
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) >> 10
        try:
            import resource
        except ImportError:  # Windows
            return None
        # The peak of the whole process, which cannot be reset; in bytes on macOS, else in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> (20 if platform.system() == "Darwin" else 10)
