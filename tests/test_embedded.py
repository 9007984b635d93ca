"""The embedded network and images, and the network's error under corruptions."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

import ctta
from ctta.data.corruptions import CORRUPTIONS, corrupt
from ctta.data.datasets import sample

PACKAGE = Path(ctta.__file__).parent
PROVENANCE = (PACKAGE / "models" / "PROVENANCE.md").read_text()
#: Error in percent of the embedded network on the first 500 test images, corrupted by the published code, severity 5.
REFERENCE_ERRORS: dict[str, float] = json.loads(
    (Path(__file__).parent / "data" / "embedded_reference_errors.json").read_text()
)
NUM_IMAGES, SEEDS = 500, range(2)


@torch.inference_mode()
def find_errors(images: NDArray[np.uint8], labels: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return which images the embedded network misclassifies, with its running statistics."""
    net = ctta.models.embedded()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    predicted = np.concatenate([net(batch).argmax(1).numpy() for batch in x.split(250)])
    errors: NDArray[np.bool_] = predicted != labels
    return errors


def test_network_and_sample_are_small() -> None:
    assert (PACKAGE / "models" / "embedded.safetensors").stat().st_size <= 2_000_000
    assert (PACKAGE / "data" / "datasets" / "sample.npz").stat().st_size <= 6_000_000
    assert sum(parameter.numel() for parameter in ctta.models.embedded().parameters()) == 269_722


def test_provenance_matches_the_files() -> None:
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| `(\w{64})` \|$", PROVENANCE, re.MULTILINE)
    assert [name for name, _, _ in rows] == [
        "models/embedded.safetensors",
        "models/embedded_stats.safetensors",
        "models/embedded_stats_frozen.safetensors",
        "models/streets.safetensors",
        "detection/streets.safetensors",
        "data/datasets/sample.npz",
        "benchmarks/networks/wide.safetensors",
        "benchmarks/networks/streets_bn.safetensors",
    ]
    for name, size, digest in rows:
        folder = Path(__file__).parents[1] if name.startswith("benchmarks/") else PACKAGE
        content = (folder / name).read_bytes()
        assert len(content) == int(size.replace(",", ""))
        assert hashlib.sha256(content).hexdigest() == digest


def test_weights_carry_metadata_of_their_training() -> None:
    with safe_open(PACKAGE / "models" / "embedded.safetensors", "pt") as file:
        metadata = file.metadata()
    # As benchmarks/train/embedded.py writes it.
    assert set(metadata) == {"data", "epochs", "seed", "test_error", "torch"}
    assert f"{100 * float(metadata['test_error']):.2f} %" in PROVENANCE
    script = (Path(__file__).parents[1] / "benchmarks" / "train" / "embedded.py").read_text()
    assert all(f'"{key}": ' in script for key in metadata)
    assert metadata["data"] in script


def test_sample_is_balanced() -> None:
    data = sample()
    assert data.images.shape == (2000, 32, 32, 3)
    assert np.bincount(data.labels).tolist() == [196, 198, 195, 199, 198, 185, 216, 193, 217, 203]


def test_clean_error() -> None:
    data = sample()
    assert find_errors(data.images, data.labels).mean() <= 0.10


def test_corruptions_cause_the_same_errors_as_the_published_ones() -> None:
    """Compare means over two seeds: each corruption within 5 points, and the mean of all within 1."""
    data = sample()
    images, labels = data.images[:NUM_IMAGES], data.labels[:NUM_IMAGES]

    def mean_error(name: str) -> float:
        first, second = (corrupt(images[:4], name, 5, seed=seed) for seed in SEEDS[:2])
        seeds = SEEDS[:1] if np.array_equal(first, second) else SEEDS  # some corruptions draw nothing
        return 100 * float(np.mean([find_errors(corrupt(images, name, 5, seed=seed), labels) for seed in seeds]))

    errors = {name: mean_error(name) for name in CORRUPTIONS}
    outliers = {
        name: (errors[name], REFERENCE_ERRORS[name])
        for name in errors
        if abs(errors[name] - REFERENCE_ERRORS[name]) > 5
    }
    assert not outliers
    assert abs(np.mean(list(errors.values())) - np.mean([REFERENCE_ERRORS[name] for name in errors])) <= 1
