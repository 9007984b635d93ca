"""What two evaluations may differ in without saying so: weights, normalization, trained tensors, images and order.

An evaluation with a folder writes it to ``facts.json``, for ``ctta diff``. The result does not depend on it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ctta.core.model import AdaptiveModel
from ctta.data.streams import Stream
from ctta.errors import DataError
from ctta.io.atomic import atomic_write
from ctta.models import Normalized
from ctta.nn.surgery import fingerprint

FILE = "facts.json"


def describe_facts(model: AdaptiveModel, stream: Stream | None) -> dict[str, Any]:
    """Return what an evaluation depends on, part by part; plain JSON.

    Args:
        model: The model before its first step.
        stream: The stream; None for data that can be read only once.

    Returns:
        The facts by name.
    """
    source = model.source
    inner = source.net if isinstance(source, Normalized) else source
    facts: dict[str, Any] = {
        "weights": fingerprint(inner),
        "network": type(inner).__name__,
        "normalization": _describe_normalization(source),
        "trained": _list_trained(model),
    }
    return facts if stream is None else facts | _describe_stream(stream)


def write_facts(folder: Path, model: AdaptiveModel, stream: Stream | None) -> None:
    """Write the facts of an evaluation to its folder, unless they are there.

    Args:
        folder: The folder.
        model: The model before its first step.
        stream: As for :func:`describe_facts`.
    """
    if not (folder / FILE).exists():
        with atomic_write(folder / FILE) as temporary:
            temporary.write_text(json.dumps(describe_facts(model, stream), indent=1), encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts in the folder of an evaluation; empty if it was written by an earlier version.

    Args:
        folder: The folder.

    Returns:
        The facts by name.

    Raises:
        DataError: The file is damaged.
    """
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder / FILE} is damaged ({error}): delete it, and run the evaluation again") from error


def _describe_normalization(source: nn.Module) -> dict[str, list[float]] | None:
    if not isinstance(source, Normalized):
        return None
    return {name: [round(float(value), 6) for value in getattr(source, name).flatten()] for name in ("mean", "std")}


def _list_trained(model: AdaptiveModel) -> list[str]:
    """Return the names of the parameters that the optimizer of the method has."""
    method = model.unwrapped
    optimizer = method.optimizer
    if optimizer is None:
        return []
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in method.named_parameters() if id(parameter) in trained]
    # The same layers have the same names, whether a normalization is in front of the network or not.
    return [name.replace(".net.", ".", 1) if isinstance(method.source, Normalized) else name for name in names]


def _describe_stream(stream: Stream) -> dict[str, Any]:
    images, order = hashlib.sha256(), hashlib.sha256()
    for segment in sorted(stream.segments, key=lambda segment: (segment.domain, segment.visit)):
        images.update(f"{segment.domain}\n{segment.images.name}\n".encode())
        images.update(np.sort(segment.rows).astype("<i8").tobytes())
    for segment in stream.segments:
        order.update(segment.domain.encode())
        order.update(np.asarray(segment.rows, "<i8").tobytes())
    x = stream.read_batch(0).x
    means = x.mean([axis for axis in range(x.ndim) if axis != 1])
    return {
        "images": images.hexdigest()[:16],
        "order": order.hexdigest()[:16],
        "batch_size": stream.batch_size,
        "input": {
            "low": round(float(x.min()), 4),
            "high": round(float(x.max()), 4),
            "mean": [round(float(value), 4) for value in means],
            "size": list(x.shape[1:]),
        },
    }
