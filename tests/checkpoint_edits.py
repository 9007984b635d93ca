"""Saved streams of several kinds, and every edit of a field in their headers."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saved_streams import STREAM, Header, Tensors, make_network
from torch import nn

import ctta
from ctta import policies
from ctta.io.tensors import write_tensors
from ctta.views import fast_image_views, image_views

MODELS: dict[str, Callable[[nn.Module], ctta.AdaptiveModel]] = {
    "tent": ctta.Tent,
    "cotta": lambda net: ctta.CoTTA(net, views=image_views(2)),
    "cotta_fast": lambda net: ctta.CoTTA.fast(net, views=fast_image_views(2)),
    "guarded_tent": lambda net: ctta.Guarded(ctta.Tent(net)),
    "guarded_cotta": lambda net: ctta.Guarded(ctta.CoTTA(net, views=image_views(2), threshold=1.1), snapshot_every=2),
    "eata": lambda net: ctta.EATA(net, source_stats=ctta.source_stats(net, STREAM[:2]), margin=1.0, redundancy=1.1),
    "rotta": lambda net: ctta.RoTTA(net, memory_size=6, update_every=4),
    "t3a": lambda net: ctta.T3A(net, num_supports=3),
    "delta": lambda net: ctta.DELTA(net, loss="weighted_entropy"),
    "tribe": lambda net: ctta.TRIBE(net, max_entropy=1.0),
    "adacontrast": lambda net: ctta.AdaContrast(net, bank_size=16, queue_size=16, start_after=6, num_neighbors=3),
    "policies": lambda net: ctta.Tent(net, policies=[policies.kalman(), policies.reset_every(9), policies.restore()]),
    "adaptive_reset": lambda net: ctta.Tent(net, policies=[policies.adaptive_reset(share=2.0)]),
}
DELETED = object()
#: What a field is replaced by: nothing, wrong types, zero, negative and huge numbers, no numbers, other strings.
REPLACEMENTS: tuple[Any, ...] = (
    DELETED, None, True, 0, -1, 1, 10**18, 10**400, 0.5, -0.5, 1e300, float("nan"), float("inf"), "", "x", "tent",
    "SGD", [], [0], [[]], {}, {"sequence": [0]}, {"x": 1},
)  # fmt: skip

Path_ = tuple[Any, ...]


def paths_in(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of every field; of a list only the first item, as the others are like it."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from paths_in(child, (*path, key))


def edit(header: Header, path: Path_, replacement: Any) -> Header:
    """Return a copy of a header with one field replaced or deleted."""
    edited = copy.deepcopy(header)
    parent: Any = edited
    for key in path[:-1]:
        parent = parent[key]
    if replacement is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = copy.deepcopy(replacement)
    return edited


def save_adapted(name: str, path: Path) -> None:
    """Save a model after three batches."""
    model = MODELS[name](make_network())
    for x in STREAM[:3]:
        model(x)
    ctta.save(model, path)


def is_refused(header: Header, tensors: Tensors, path: Path_, file: Path) -> bool:
    """Return whether an edited file is refused; if it is not, its model must take the next step and be saved.

    A stream may take other inputs than before, if its own specification of inputs was edited.
    """
    write_tensors(file, tensors, "ctta", header)  # with a checksum that fits
    try:
        model = ctta.load(file, make_network())
    except (ctta.CheckpointError, ctta.ConfigError) as error:
        assert str(error)
        return True
    try:
        logits = model(STREAM[3])
        assert bool(logits.isfinite().all())
    except (ctta.InputError, TypeError):
        if "input_spec" not in path:
            raise
    ctta.save(model, file)
    return False
