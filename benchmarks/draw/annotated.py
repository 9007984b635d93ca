"""Draw docs/figures/annotated.png: a frame of the video that ``ctta adapt --annotate`` writes for streets in snow.

python -m benchmarks.draw.annotated [--out PNG]
"""

import argparse
import tempfile
from pathlib import Path

from PIL import Image

import ctta
from benchmarks.networks.load import streets_bn
from ctta.adapt import adapt_video
from ctta.data.streets import render_frame

REPOSITORY = Path(__file__).parents[2]
NUM_SCENES = 6
NUM_COLORS = 160  # snow does not compress


def main() -> None:
    """Parse arguments, adapt to numbered images, and save one of the annotated frames."""
    parser = argparse.ArgumentParser(description="Draw a frame of an annotated video.")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "figures" / "annotated.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_SCENES):
            Image.fromarray(render_frame(number, "snow").image).save(Path(folder, f"{number}.png"))
        clip, net = Path(folder, "annotated.mp4"), streets_bn()
        adapt_video(
            net, f"{folder}/%d.png", Path(folder, "a.csv"), method="cotta_segmentation", batch_size=2, annotate=clip
        )
        *_, last = ctta.data.streams.video(clip)
    frame = Image.fromarray(last.frames[-2]).convert("P", palette=Image.Palette.ADAPTIVE, colors=NUM_COLORS)
    frame.save(arguments.out, optimize=True)
    print(f"{arguments.out} ({arguments.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
