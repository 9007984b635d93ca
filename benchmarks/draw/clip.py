"""Draw docs/figures/snow.webp: a network on streets in snow, as it is and adapted, side by side.

    python -m benchmarks.draw.clip [--scenes 20] [--out WEBP]

The scenes are the first ones of the reported split, one after the other, each shown for a second. The network was
trained in clear weather; both panels show what it answers before anybody sees the labels.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import ctta
from benchmarks.networks.load import streets_bn
from ctta.data.streets import CLASSES, PALETTE, render_frame

REPOSITORY = Path(__file__).parents[2]
GAP, TITLE_HEIGHT, LEGEND_HEIGHT, SCALE = 6, 26, 24, 1.5
FONT_SIZE, SECONDS_PER_SCENE = 14, 1.0


def predict(model: torch.nn.Module, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the predicted label map; a method adapts to the image on the way."""
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        label: NDArray[np.uint8] = model(x).argmax(1)[0].numpy().astype(np.uint8)
    return label


def count_matches(prediction: NDArray[np.uint8], label: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return intersection and union of every class, (2, classes)."""
    classes = np.arange(len(CLASSES))[:, None, None]
    predicted, labeled = prediction == classes, label == classes
    counts = [(predicted & labeled).sum((1, 2)), (predicted | labeled).sum((1, 2))]
    return np.asarray(counts, dtype=np.int64)


def compose(panels: dict[str, NDArray[np.uint8]]) -> Image.Image:
    """Return four titled panels in two rows above a legend."""
    height, width, _ = next(iter(panels.values())).shape
    width, height = round(width * SCALE), round(height * SCALE)
    size = 2 * width + 3 * GAP, 2 * (height + TITLE_HEIGHT) + LEGEND_HEIGHT + GAP
    frame = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(frame), ImageFont.load_default(FONT_SIZE)
    for number, (title, pixels) in enumerate(panels.items()):
        left, top = GAP + number % 2 * (width + GAP), number // 2 * (height + TITLE_HEIGHT)
        draw.text((left + 2, top + TITLE_HEIGHT // 2), title, "black", font, anchor="lm")
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        frame.paste(resized, (left, top + TITLE_HEIGHT))
    left, center = GAP, frame.height - LEGEND_HEIGHT // 2
    for name, color in zip(CLASSES, PALETTE.tolist(), strict=True):
        draw.rectangle((left, center - 6, left + 12, center + 6), tuple(color), "black")
        draw.text((left + 17, center), name, "black", font, anchor="lm")
        left += 30 + round(draw.textlength(name, font))
    return frame


def draw_frames(num_scenes: int) -> list[Image.Image]:
    """Return a frame per scene; titles have the mean IoU over all scenes so far."""
    net = streets_bn()
    models = {"network as trained": ctta.Source(net), "the same network, adapting": ctta.CoTTA.segmentation(net)}
    counts = {name: np.zeros((2, len(CLASSES)), dtype=np.int64) for name in models}
    frames = []
    for index in range(num_scenes):
        scene = render_frame(index, "snow")
        panels = {f"streets in snow, scene {index + 1} of {num_scenes}": scene.image, "labels": PALETTE[scene.label]}
        for name, model in models.items():
            prediction = predict(model, scene.image)
            counts[name] += count_matches(prediction, scene.label)
            iou = (counts[name][0] / np.maximum(counts[name][1], 1)).mean()
            panels[f"{name}: mIoU {100 * iou:.0f} % so far"] = PALETTE[prediction]
        frames.append(compose(panels))
    return frames


def main() -> None:
    """Parse arguments, draw and save."""
    parser = argparse.ArgumentParser(description="Draw a network on streets in snow, as it is and adapted.")
    parser.add_argument("--scenes", type=int, default=20, help="number of scenes, a second each")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "figures" / "snow.webp")
    arguments = parser.parse_args()
    frames = draw_frames(arguments.scenes)
    duration = round(1000 * SECONDS_PER_SCENE)
    frames[0].save(
        arguments.out, save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=60, method=6
    )
    print(arguments.out, f"{arguments.out.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
