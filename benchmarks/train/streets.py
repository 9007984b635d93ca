"""Train a source network on the synthetic street in clear weather, on frames rendered on the fly.

    python -m benchmarks.train.streets --network segformer --weights streets.safetensors
    python -m benchmarks.train.streets --network bn --weights streets_bn.safetensors

Both networks are trained as the reference's SegFormer was, so that views at other scales show them nothing new. The
schedule is fixed in advance, and is the same for both:

- each frame is resized by a factor from 0.5 to 2 and cropped back to 128x256 at a random place (images bilinear, labels
  nearest; beyond the edge the image is mirrored and its pixels are not scored), and half of the frames are flipped;
- photometric distortion: brightness by up to 32/255, contrast and saturation by factors from 0.5 to 1.5, hue by up to a
  twentieth of the circle either way, each for half of the frames;
- AdamW with weight decay 0.01, linear warm-up to 1e-3 over a twentieth of the steps, cosine decay to zero, gradients
  clipped to norm 1.

Frames come from the split "train", each used once; mIoU is printed on clear frames of the split "choose", at scales
0.5, 1 and 2. The randomness of step k depends on (seed, k) only, and checkpoints are written regularly, so an
interrupted run resumes where it stopped. The SegFormer needs the extra segmentation.
"""

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.load import StreetCNN
from ctta.data.datasets import StreetScenes
from ctta.data.streets import CLASSES, VERSION
from ctta.io.atomic import atomic_write
from ctta.models import tiny_segformer
from ctta.nn.surgery import resize
from ctta.views import ScaledView
from ctta.views.image import adjust_hue_, scale_distances_, to_grayscale

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "segformer": lambda: tiny_segformer().net,
    "bn": lambda: StreetCNN(len(CLASSES)),
}
SIZE = (128, 256)
SCALES = (0.5, 2.0)
IGNORED = 255  # the label of pixels beyond the edge of a frame
PEAK_LR = 1e-3
WARMUP_FRACTION = 0.05  # of all steps
WEIGHT_DECAY = 0.01
MAX_FILE_SIZE = 4_000_000  # bytes
NUM_VALIDATION_FRAMES = 100  # frames
REPORT_EVERY = 250  # steps; also the interval of checkpoints


def render_frames(split: str, first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return clear frames and their labels; runs in a worker process."""
    return StreetScenes("clear", split, first + count, seed, SIZE).read(np.arange(first, first + count))


def render_batches(steps: range, batch_size: int, seed: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batch of each step, rendered ahead; the frames of step k start at k * batch_size."""
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pending = deque(
            pool.submit(render_frames, "train", k * batch_size, batch_size, seed) for k in steps[: 2 * workers]
        )
        for k in steps:
            batch = pending.popleft().result()
            if (ahead := k + 2 * workers) in steps:
                pending.append(pool.submit(render_frames, "train", ahead * batch_size, batch_size, seed))
            yield batch


def augment(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return each frame resized, cropped, flipped and recolored at random, with the labels to match."""
    x, y = resize_and_crop(x, y, generator)
    return torch.cat([distort_colors(frame, generator) for frame in x.split(1)]), y


def resize_and_crop(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return each frame at a scale of its own, cropped back to its size at a random place; half are flipped."""
    extent = 1 / (SCALES[0] + (SCALES[1] - SCALES[0]) * torch.rand(len(x), generator=generator))  # of the crop
    flip = torch.where(torch.rand(len(x), generator=generator) < 0.5, -1.0, 1.0)
    shift = (1 - extent).abs() * (2 * torch.rand(2, len(x), generator=generator) - 1)
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = extent * flip, extent, shift.T
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    labels = F.grid_sample(y[:, None].float(), grid, mode="nearest", align_corners=False)[:, 0].long()
    is_beyond = grid.abs().amax(-1) > 1
    images = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return images, labels.masked_fill(is_beyond, IGNORED)


def distort_colors(frame: Tensor, generator: torch.Generator) -> Tensor:
    """Return one frame (1, 3, H, W) with other brightness, contrast, saturation and hue, each half of the time."""
    frame = frame.clone()
    chosen = (torch.rand(4, generator=generator) < 0.5).tolist()
    brightness, contrast, saturation, hue = (2 * torch.rand(4, generator=generator) - 1).tolist()
    if chosen[0]:
        frame.add_(brightness * 32 / 255).clamp_(0, 1)
    if chosen[1]:
        factor = 1 + 0.5 * contrast
        scale_distances_(frame, factor, [factor], [to_grayscale(frame).mean((1, 2, 3), keepdim=True)])
    if chosen[2]:
        factor = 1 + 0.5 * saturation
        scale_distances_(frame, factor, [factor], [to_grayscale(frame)])
    if chosen[3]:
        adjust_hue_(frame, 6 * (0.05 * hue))
    return frame


def learning_rate(progress: float) -> float:
    """Return the learning rate at a progress from 0 to 1: linear warm-up, then cosine decay to 0."""
    if progress < WARMUP_FRACTION:
        return PEAK_LR * progress / WARMUP_FRACTION
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_FRACTION) / (1 - WARMUP_FRACTION)))


def compute_logits(net: nn.Module, x: Tensor) -> Tensor:
    """Return the logits at the size of the input."""
    output = net(x)
    return resize(output if isinstance(output, Tensor) else output.logits, x.shape[2:])


@torch.inference_mode()
def compute_class_iou(net: nn.Module, count: int, batch_size: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return the intersection over union of each class on clear validation frames, seen at a scale."""
    view = ScaledView(scale, flip=False)
    net.eval()
    confusion = torch.zeros(len(CLASSES) ** 2, dtype=torch.int64)
    for first in range(0, count, batch_size):
        x, y = render_frames("choose", first, min(batch_size, count - first), seed)
        pairs = y * len(CLASSES) + view(partial(compute_logits, net), x).argmax(1)
        confusion += torch.bincount(pairs.flatten(), minlength=len(confusion))
    table = confusion.view(len(CLASSES), -1).double()
    hit = table.diagonal()
    return hit / (table.sum(0) + table.sum(1) - hit).clamp(min=1)


def train(arguments: argparse.Namespace, checkpoint: Path) -> nn.Module:
    """Train a new network, or resume from the checkpoint."""
    torch.manual_seed(arguments.seed)
    net = NETWORKS[arguments.network]()
    optimizer = torch.optim.AdamW(net.parameters(), PEAK_LR, weight_decay=WEIGHT_DECAY)
    run = {name: getattr(arguments, name) for name in ("network", "steps", "batch_size", "seed")} | {"streets": VERSION}
    state: dict[str, Any] = {"run": run, "done": 0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["run"] != run:
            raise ValueError(f"{checkpoint} belongs to a run with other arguments, {state['run']}: delete it")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    steps, start, losses = range(state["done"], arguments.steps), time.perf_counter(), []
    batches = render_batches(steps, arguments.batch_size, arguments.seed, arguments.workers)
    for step, (x, y) in zip(steps, batches, strict=True):
        net.train()
        optimizer.param_groups[0]["lr"] = learning_rate(step / arguments.steps)
        x, y = augment(x, y, torch.Generator().manual_seed(arguments.seed * 1_000_003 + step))
        loss = F.cross_entropy(compute_logits(net, x), y, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == arguments.steps:
            miou = compute_class_iou(
                net, min(32, arguments.validation_frames), arguments.batch_size, arguments.seed
            ).mean()
            pace = (time.perf_counter() - start) / (step + 1 - steps.start)
            print(f"step {step + 1}/{arguments.steps}  loss {np.mean(losses):.4f}  mIoU {100 * miou:.1f}  {pace:.2f} s")
            losses.clear()
            state |= {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            with atomic_write(checkpoint, unique=False) as partial:
                torch.save(state, partial)
    return net


def main() -> None:
    """Train, evaluate on the validation frames, and write the weights."""
    parser = argparse.ArgumentParser(description="Train a source network on the synthetic street in clear weather.")
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="file to write, .safetensors")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that render frames")
    parser.add_argument("--validation-frames", type=int, default=NUM_VALIDATION_FRAMES, help="frames to evaluate on")
    arguments = parser.parse_args()
    net = train(arguments, Path(f"{arguments.weights}.checkpoint"))
    iou = compute_class_iou(net, arguments.validation_frames, arguments.batch_size, arguments.seed)
    for name, value in zip(CLASSES, iou.tolist(), strict=True):
        print(f"{name:12}{100 * value:6.1f}")
    print(f"{'mIoU':12}{100 * iou.mean():6.1f}   {sum(p.numel() for p in net.parameters()):,} parameters")
    for scale in (SCALES[0], SCALES[1]):
        scaled = compute_class_iou(net, arguments.validation_frames, arguments.batch_size, arguments.seed, scale)
        print(f"{f'at scale {scale}':12}{100 * scaled.mean():6.1f}")
    metadata = {
        "data": f"ctta.data.streets version {VERSION}, split train, clear",
        "network": arguments.network,
        "steps": str(arguments.steps),
        "batch_size": str(arguments.batch_size),
        "seed": str(arguments.seed),
        "miou_clear": f"{iou.mean():.4f}",
        "torch": torch.__version__,
    }
    tensors = {key: value.contiguous() for key, value in net.state_dict().items()}
    save_file(tensors, arguments.weights, metadata)
    arguments.weights.chmod(0o644)  # safetensors creates files that only their owner can read
    size = arguments.weights.stat().st_size
    print(f"{arguments.weights}: {size / 1e6:.2f} MB")
    if size > MAX_FILE_SIZE:
        raise SystemExit(f"target missed: the file has {size:,} bytes, more than {MAX_FILE_SIZE:,}")


if __name__ == "__main__":
    main()
