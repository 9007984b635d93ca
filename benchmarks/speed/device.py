"""What a step of each method costs on a device: time, memory, and what 16 bits save.

    python -m benchmarks.speed.device --device cuda [--out FILE] [NAME ...]

A step and its bare passes take turns, as in :mod:`benchmarks.speed.methods`, and each time ends when the device is
idle. The peak memory is that of the device's own counters. Prints Markdown and writes it to a file, to be sent to the
authors.
"""

import argparse
import platform
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.baseline import faster_layout, forward_backward, use_batch_statistics_
from benchmarks.speed.measurements import compare_times, make_clock
from benchmarks.speed.methods import BUDGET, PASSES, needs_vit, prepare
from benchmarks.speed.resnet50 import resnet50
from ctta.core.options import resolve_device
from ctta.evaluation.steps import PeakMemory, name_device
from ctta.testing.networks import BlockViT

#: Methods that are measured on a larger network too.
LARGE = ("source", "bn_stats", "tent", "cotta", "vane")
HEADINGS = ("method", "network", "ms/image", "step / bare passes", "95 % interval", "peak MiB", "bf16 / float32 time")


def measure_row(name: str, title: str, net: nn.Module, images: Tensor) -> tuple[str, ...]:
    """Return the row of one method on a network."""
    x, clock = images[: PASSES[name].batch_size], make_clock(images.device)
    model, bare = prepare(name, net, images)
    half, _ = prepare(name, net, images, "bf16")
    memory = PeakMemory(images.device)
    model(x)
    peak = memory.read_mib()
    times = compare_times(partial(model, x), partial(bare, x), budget=BUDGET, clock=clock)
    saved = compare_times(partial(half, x), partial(model, x), budget=BUDGET, clock=clock)
    return (
        name,
        f"{title}, batch {len(x)}",
        f"{1000 * times.ours / len(x):.3f}",
        f"{times.ratio:.2f}",
        f"{times.low:.2f} to {times.high:.2f}",
        "" if peak is None else str(peak),
        f"{saved.ratio:.2f}",
    )


def measure(names: list[str], device: torch.device, *, is_small: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the named methods, and of some on a larger network; small ones take seconds, for a trial."""
    size, num_images = (8, 96) if is_small else (32, 200)
    pixels, _ = ctta.data.datasets.sample().domain("gaussian_noise", 3).read(np.arange(num_images))
    images = pixels[:, :, :size, :size].to(device)
    resnet20 = faster_layout(lambda: ctta.models.embedded().to(device), images, forward_backward)
    vit = use_batch_statistics_(BlockViT(width=64, size=size, depth=6)).to(device)
    for name in names:
        yield measure_row(name, *(("ViT", vit) if needs_vit(name) else ("ResNet-20", resnet20)), images)
    if is_small:
        return
    large = torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
    net = faster_layout(lambda: resnet50().to(device), large, forward_backward)
    for name in (name for name in LARGE if name in names):
        yield measure_row(name, "ResNet-50", net, large)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="small images and one network, to try the script")
    options = parser.parse_args()
    device = torch.device(resolve_device(options.device))
    about = f"{name_device(device)}, torch {torch.__version__}, ctta {ctta.__version__}, {platform.platform()}"
    lines = [about, "", f"| {' | '.join(HEADINGS)} |", f"|---|---|{'---:|' * (len(HEADINGS) - 2)}"]
    print("\n".join(lines), flush=True)
    torch.set_num_threads(1)
    for row in measure(options.names or list(PASSES), device, is_small=options.small):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    (options.out or Path(f"bench-{device.type}.md")).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
