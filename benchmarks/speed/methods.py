"""The time of a step of every method relative to the bare passes that its definition needs.

    python -m benchmarks.speed.methods [NAME ... | --check]

:mod:`bare_passes` says what these passes are, and the table below how many each method needs. A step and its bare
passes take turns, and the ratio is the median over pairs of the times that one thread computed, so that other jobs
on the machine disturb it little. A run first counts the images that go forward and back through the network, and
stops if a step has other passes than its row; ``--check`` does nothing else.
"""

import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.bare_passes import BarePasses, Passes, require_equal_passes
from benchmarks.speed.baseline import faster_layout, forward_backward, use_batch_statistics_
from benchmarks.speed.measurements import Measurement, compare_times, make_clock
from ctta.core.options import Precision
from ctta.testing.networks import BlockViT
from ctta.views import geometric_views, image_views

TARGET = 1.10
#: Seconds for the pairs of one method, of which there are at least three.
BUDGET = 1.5

ONE_VIEW, EIGHT_VIEWS, MEMO_VIEWS = image_views(1), image_views(8), image_views(32)
#: The passes of TENT and its successors: one pass forward and back.
ENTROPY = Passes(learned=1)
#: Every image is selected, so that there is something to learn from whatever the network says.
ETA = Passes(learned=1, settings={"margin": 10.0, "redundancy": 2.0})
ROID = Passes(learned=2, views=(ONE_VIEW,), shows_selected=True)
#: The mean over eight views, where the reference has 32: the overhead of the rest counts more.
AVERAGED = Passes(constant=9, learned=1, views=(EIGHT_VIEWS,), settings={"views": EIGHT_VIEWS, "threshold": 1.0})

PASSES: dict[str, Passes] = {
    "source": Passes(predict=1),
    "bn_stats": Passes(constant=1),
    "pseudo_label": ENTROPY,
    "tent": ENTROPY,
    "test_aug": Passes(constant=8, views=(EIGHT_VIEWS,), settings={"views": EIGHT_VIEWS}),
    "cotta": AVERAGED,
    "rotta": Passes(
        predict=1, constant=1, learned=1, views=(ONE_VIEW,), from_memory=True, update_every=64, batch_size=200
    ),
    "petta": Passes(predict=1, constant=2, learned=2, views=(ONE_VIEW,), from_memory=True, batch_size=200),
    "note": Passes(predict=1, learned=1, from_memory=True, update_every=64, batch_size=200),
    "sotta": Passes(
        predict=1,
        learned=1,
        rounds=2,
        from_memory=True,
        update_every=64,
        batch_size=200,
        settings={"min_confidence": 0.0},
    ),
    "tribe": Passes(predict=1, constant=1, learned=2, views=(ONE_VIEW,), settings={"max_entropy": 10.0}),
    "bn_alpha": Passes(constant=1),
    "bn_ema": Passes(predict=1, constant=1),
    "unmix_tns": Passes(constant=1),
    "eta": ETA,
    "eata": ETA,
    "rpl": ENTROPY,
    "slr": ENTROPY,
    "sar": Passes(learned=1, rounds=2, settings={"margin": 10.0}),
    "rdumb": ETA,
    "roid": ROID,
    "cmf": ROID,
    "deyo": Passes(constant=1, learned=1, settings={"select_below": 10.0, "min_drop": 0.0}),
    "zerosiam": ENTROPY,
    "lame": Passes(predict=1),
    "t3a": Passes(constant=1),
    "neo": Passes(constant=1),
    "tda": Passes(constant=1),
    "dota": Passes(constant=1),
    "shot_im": ENTROPY,
    "santa": Passes(constant=1, learned=2, views=(ONE_VIEW,)),
    "rmt": Passes(constant=1, learned=2, views=(ONE_VIEW,)),
    "petal": AVERAGED,
    "palm": Passes(learned=2, extra_backward=1, views=(ONE_VIEW,)),
    "tea": Passes(constant=1, learned=2, to_input=20, batch_size=20),
    "memo": Passes(learned=1, views=(MEMO_VIEWS,), per_image=True, batch_size=4, settings={"views": MEMO_VIEWS}),
    "adacontrast": Passes(
        predict=1, constant=3, learned=1, views=(image_views(1, color=0.0, motion=0.25), image_views(2))
    ),
    "delta": ENTROPY,
    "rem": Passes(learned=3),
    "foa": Passes(constant=28),
    "pea": Passes(constant=6),
    "vane": Passes(predict=1, constant=4, learned=1, views=(geometric_views(4),)),
}


def measure(names: list[str] | None = None) -> Iterator[Measurement]:
    """Yield the ratio of each method."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images, _ = ctta.data.datasets.sample().domain("gaussian_noise", 3).read(np.arange(200))
        resnet20 = faster_layout(ctta.models.embedded, images, forward_backward)
        vit = use_batch_statistics_(BlockViT(width=64, size=32, depth=6))
        for name in names or ctta.METHODS:
            yield measure_method(name, vit if needs_vit(name) else resnet20, images)
    finally:
        torch.set_num_threads(num_threads)


def needs_vit(name: str) -> bool:
    info = ctta.METHODS[name].info
    return info is not None and info.needs_vit


def prepare(
    name: str, net: nn.Module, images: Tensor, amp: Precision | None = None
) -> tuple[ctta.AdaptiveModel, BarePasses]:
    """Return a model and its bare passes, after one step of each that counted the images."""
    method, passes = ctta.METHODS[name], PASSES[name]
    settings = dict(passes.settings) | ({} if amp is None else {"amp": amp})
    if method.info is not None and method.info.needs_source_data:
        labels = torch.arange(len(images)) % 10
        settings["source_stats"] = ctta.source_stats(net, [images], labels, blocks=method.info.needs_vit)
    model = method(net, **settings)
    bare = BarePasses(passes, model, net)
    require_equal_passes(model, bare, images[: passes.batch_size])
    return model, bare


def measure_method(name: str, net: nn.Module, images: Tensor) -> Measurement:
    """Return the ratio of one method."""
    model, bare = prepare(name, net, images)
    x = images[: PASSES[name].batch_size]
    times = compare_times(partial(model, x), partial(bare, x), budget=BUDGET, clock=make_clock(x.device))
    title = name if model.info is None else model.info.title
    network = f"{'ViT' if needs_vit(name) else 'ResNet-20'}, batch {len(x)}"
    return Measurement(
        f"{title} step / its bare passes, {network}",
        times.ratio,
        TARGET,
        ms_per_image=1000 * times.ours / len(x),
        low=times.low,
        high=times.high,
    )


def check() -> None:
    """Verify the table: count the passes of every method on few small images, without measuring time."""
    torch.set_num_threads(1)
    images = torch.rand(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    resnet20 = use_batch_statistics_(ctta.models.embedded())
    vit = use_batch_statistics_(BlockViT(size=8))
    for name in ctta.METHODS:
        prepare(name, vit if needs_vit(name) else resnet20, images)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        for row in measure(sys.argv[1:]):
            print(row, flush=True)
