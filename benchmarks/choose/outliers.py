"""How far images are from what a network saw in training, and what one outlier costs VANE.

    python -m benchmarks.choose.outliers

The embedded network on the sample images: clean, under the hold-out corruptions at severity 5, and with one pixel of
another value. Prints the largest deviation of an image, which ``MAX_DEVIATION`` of VANE is compared with, and the
error on 1,500 clean images after a stream of 250, in batches of 50, that ended in one batch with that pixel.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ctta
from ctta.data.corruptions import HOLD_OUT, corrupt
from ctta.data.datasets import sample
from ctta.methods.vane.statistics import measure_deviations

BATCH_SIZE, NUM_BEFORE, NUM_AFTER = 50, 250, 1500
PIXELS = (-30.0, -100.0, -1e4, -65535.0, -1e18, 1e4)


def set_pixel(x: Tensor, value: float) -> Tensor:
    """Return images of which the first one has another value in one pixel of one channel."""
    changed = x.clone()
    changed[0, 0, 5, 5] = value
    return changed


def measure_error(x: Tensor, labels: Tensor, pixel: float | None) -> float:
    """Return the error in percent after a batch with a pixel of this value; None for the batch as it is."""
    model = ctta.VANE(ctta.models.embedded())
    *before, last = x[: NUM_BEFORE + BATCH_SIZE].split(BATCH_SIZE)
    for batch in (*before, last if pixel is None else set_pixel(last, pixel)):
        model(batch)
    after = slice(NUM_BEFORE + BATCH_SIZE, NUM_BEFORE + BATCH_SIZE + NUM_AFTER)
    answers = torch.cat([model(batch).argmax(1) for batch in x[after].split(BATCH_SIZE)])
    return 100 * float((answers != labels[after]).float().mean())


def main() -> None:
    """Print both tables."""
    source = ctta.VANE(ctta.models.embedded()).source
    data = sample()
    images, labels = data.images, torch.from_numpy(np.asarray(data.labels))

    def to_input(pixels: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255

    x = to_input(images)
    print(f"{'clean':20} largest deviation {float(measure_deviations(source, x).max()) ** 0.5:6.2f}")
    for name in HOLD_OUT:
        corrupted = to_input(corrupt(images, name, 5))
        print(f"{name:20} largest deviation {float(measure_deviations(source, corrupted).max()) ** 0.5:6.2f}")
    print(f"{'no outlier':20} error after it {measure_error(x, labels, None):5.1f} %")
    for value in PIXELS:
        deviation = float(measure_deviations(source, set_pixel(x[:1], value)).max()) ** 0.5
        error = measure_error(x, labels, value)
        print(f"pixel {value:<14g} largest deviation {deviation:12.4g}, error after it {error:5.1f} %")


if __name__ == "__main__":
    main()
