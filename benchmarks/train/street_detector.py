"""Train the small detector of cars and people on the drawn street in clear weather.

    python -m benchmarks.train.street_detector --weights src/ctta/detection/streets.safetensors

Frames of 192x384 come from the split "train" and are drawn before training starts. Each is resized by a factor from
0.75 to 1.5 and cropped back at a random place, half are flipped, and brightness and contrast vary by up to a fifth.
AdamW with weight decay 0.01, linear warm-up over a twentieth of the steps and cosine decay to zero, gradients clipped
to norm 10; the weights are those of the last step. The schedule is fixed in advance. At the end the mean average
precision on clear frames of the split "choose" is printed, which needs the extra detect.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ctta.data.streets import render_frame
from ctta.detection.boxes import Boxes, box_area
from ctta.detection.streets import build_street_network, draw_street_batches
from ctta.detection.yolov5 import YOLOv5Detector
from ctta.evaluation.boxes import run_detection

SIZE = (192, 384)
SCALES = (0.75, 1.5)
PEAK_LR, WEIGHT_DECAY, WARMUP_FRACTION = 3e-3, 0.01, 0.05
REPORT_EVERY = 100  # steps
NUM_VALIDATION_FRAMES = 50


def draw_frames(count: int, split: str, condition: str = "clear", seed: int = 0) -> tuple[Tensor, list[Boxes]]:
    """Return frames as bytes (N, 3, H, W), and the boxes of each."""
    images, targets = torch.empty(count, 3, *SIZE, dtype=torch.uint8), []
    for number in range(count):
        frame = render_frame(number, condition, split=split, seed=seed, size=SIZE)
        images[number] = torch.from_numpy(frame.image).permute(2, 0, 1)
        boxes, labels = frame.find_boxes()
        targets.append(Boxes(boxes=torch.from_numpy(boxes), labels=torch.from_numpy(labels)))
    return images, targets


def augment(images: Tensor, targets: list[Boxes], generator: torch.Generator) -> tuple[Tensor, list[Boxes]]:
    """Return each frame at a scale of its own, cropped, flipped and recolored at random, and the boxes that remain."""
    count, sides = len(images), torch.tensor(SIZE[::-1])
    draw = torch.rand(6, count, generator=generator)
    extent = 1 / (SCALES[0] + (SCALES[1] - SCALES[0]) * draw[0])
    flip = torch.where(draw[1] < 0.5, -1.0, 1.0)
    shift = (1 - extent).abs() * (2 * draw[2:4] - 1)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = extent * flip, extent, shift.T
    x = images.float() / 255
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    x = ((x - 0.5) * (0.8 + 0.4 * draw[4].view(-1, 1, 1, 1)) + 0.3 + 0.4 * draw[5].view(-1, 1, 1, 1)).clamp(0, 1)
    moved = []
    for number, each in enumerate(targets):
        corners = each["boxes"].view(-1, 2, 2) / sides * 2 - 1
        corners = (corners - shift[:, number]) / torch.stack([extent[number] * flip[number], extent[number]])
        corners = (corners + 1) / 2 * sides
        boxes = torch.cat([corners.amin(1), corners.amax(1)], 1)
        inside = boxes.clamp_min(0).minimum(sides.repeat(2))
        is_visible = (box_area(inside) > 0.3 * box_area(boxes)) & (box_area(inside) > 30)
        moved.append(Boxes(boxes=inside[is_visible], labels=each["labels"][is_visible]))
    return x, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--frames", type=int, default=3000, help="number of frames to draw")
    parser.add_argument("--steps", type=int, default=2500, help="number of steps")
    parser.add_argument("--batch-size", type=int, default=16, help="frames in a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    start, batch_size = time.perf_counter(), args.batch_size
    images, targets = draw_frames(args.frames, "train", seed=args.seed)
    print(f"{args.frames} frames in {time.perf_counter() - start:.0f} s", flush=True)
    net = build_street_network()
    net.initialize_head_(num_objects=9, image_side=math.sqrt(SIZE[0] * SIZE[1]))
    detector = YOLOv5Detector(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
    generator, losses = torch.Generator().manual_seed(args.seed), []
    order = np.random.default_rng(args.seed)
    for step in range(args.steps):
        warmup, progress = WARMUP_FRACTION * args.steps, step / args.steps
        rate = min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * rate
        rows = order.choice(args.frames, batch_size, replace=False)
        x, boxes = augment(images[rows], [targets[row] for row in rows], generator)
        detector.train()
        loss = detector.loss(x, boxes) * 16  # as upstream scales it for batches of 16
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % REPORT_EVERY == 0:
            mean = np.mean(losses[-REPORT_EVERY:])
            print(f"step {step + 1}: loss {mean:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
            kept = {name: value.half() for name, value in net.state_dict().items() if value.is_floating_point()}
            save_file({name: value.contiguous() for name, value in kept.items()}, args.weights)
    print(f"{args.weights.stat().st_size:,} bytes")
    detector.eval()
    run = run_detection({"": detector.predict}, draw_street_batches(["clear"], NUM_VALIDATION_FRAMES, split="choose"))
    print(run[""].score())


if __name__ == "__main__":
    main()
