"""The scenes that adapting changed most, for better and for worse, found from what two evaluations kept."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ctta.evaluation.label_maps.example import Example, Map, write_example
from ctta.evaluation.label_maps.keeping import kept_numbers, read_accuracy, read_label_maps
from ctta.streams import Stream

WIDEST = 384  # pixels of an example: enough to look at, and a page with many of them stays small


def write_examples(method: str, adapted: Path, source: Path, stream: Stream, out: Path) -> None:
    """Write the best and the worst change of a method beside the network as trained; none where nothing changed.

    Change is that of the share of right pixels, which is what one can see: mIoU of a single scene jumps with a class
    that covers a handful of its pixels.

    Args:
        method: as a table calls it.
        adapted: the folder of the method's evaluation.
        source: that of the network as trained, on the same stream.
        stream: to read the scenes from.
        out: where the files go; made if it is not there.
    """
    numbers = sorted({*kept_numbers(adapted)} & {*kept_numbers(source)})
    changes = {}
    for number in numbers:
        for place, change in enumerate(read_accuracy(adapted, number) - read_accuracy(source, number)):
            if np.isfinite(change):
                changes[number, place] = float(change)
    for kind, pick, sign in (("best", max, 1), ("worst", min, -1)):
        scene = pick(changes, key=lambda scene: changes[scene], default=None)
        if scene is not None and sign * changes[scene] > 0:
            out.mkdir(exist_ok=True)
            example = _example(method, kind, adapted, source, stream, *scene)
            write_example(example, out / f"{adapted.name}-{kind}.npz")


def _example(method: str, kind: str, adapted: Path, source: Path, stream: Stream, number: int, place: int) -> Example:
    batch, segment = stream.batch(number), stream.segment_of(number)
    assert batch.y is not None
    before, after = read_label_maps(source, number), read_label_maps(adapted, number)
    height, width = batch.y.shape[1:]
    shrink = min(1.0, WIDEST / width)
    size = (round(height * shrink), round(width * shrink))
    return Example(
        method=method,
        kind=kind,
        stream_hash=stream.hash,
        domain=batch.domain,
        segment=segment,
        class_names=stream.class_names,
        accuracy_before=float(before.accuracy[place]),
        accuracy_after=float(after.accuracy[place]),
        image=_picture(batch.x[place], size),
        truth=_nearest(batch.y[place].numpy(), size).astype(np.uint8),
        before=_nearest(before.maps[place], size),
        after=_nearest(after.maps[place], size),
    )


def _picture(image: Tensor, size: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    resized = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    return (resized.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def _nearest(classes: Map, size: tuple[int, int]) -> Map:
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, classes.shape, strict=True)
    )
    return classes[np.ix_(rows, columns)]
