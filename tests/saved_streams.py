"""A small network, a stream of batches, adapted models, and saved files that are read or changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import ctta
from ctta.io.tensors import write_tensors

STREAM = [torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(number)) for number in range(8)]

Header = dict[str, Any]
Tensors = dict[str, Tensor]


def make_network(seed: int = 0, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4)
    )


def adapted_model(source: nn.Module | None = None, **settings: Any) -> ctta.CoTTA:
    """Return CoTTA after three batches."""
    settings = {"views": ctta.views.image_views(2)} | settings
    model = ctta.CoTTA(make_network() if source is None else source, **settings)
    for x in STREAM[:3]:
        model(x)
    return model


def load_cotta(path: Path, source: nn.Module | None = None, **given: Any) -> ctta.CoTTA:
    model = ctta.load(path, make_network() if source is None else source, **given)
    assert isinstance(model, ctta.CoTTA)
    return model


def read_file(path: Path) -> tuple[Header, Tensors]:
    """Return the header and the tensors of a saved stream."""
    with safe_open(path, framework="pt") as file:
        header: Header = json.loads(file.metadata()["ctta"])
        # Copies, because the tensors are mapped from the file, which may then be overwritten.
        return header, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def rewrite_file(path: Path, change: Callable[[Header, Tensors], None]) -> Path:
    """Change the header or the tensors of a file; unless the change sets it, the list of tensors follows."""
    header, tensors = read_file(path)
    header["tensors"] = None
    change(header, tensors)
    header["tensors"] = header["tensors"] or sorted(tensors)
    write_tensors(path, tensors, "ctta", header)  # with a checksum that fits
    return path
