"""Choose the settings of `ctta bench streets` on scenes and weather that its table does not use.

    python benchmarks/choose_streets_settings.py

The table has fog, night, rain and snow; this search uses other scenes at dusk and in dust (the split "choose"), in
several rounds. It is a grid search for the best mIoU within each group of settings, one group after the other; ties go
to the earlier value.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

import ctta
from ctta.streams import rounds, streets
from ctta.views import multiscale_flip

ALL_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)

Settings = dict[str, Any]

#: Values to try, by group; the reference implementation's come first.
GROUPS: dict[str, list[dict[str, list[Any]]]] = {
    "source": [{}],
    "tent": [{"loss": ["hard", "entropy"], "lr": [7.5e-6, 1e-4, 3e-4, 1e-3, 3e-3]}],
    "cotta": [
        {"scales": [ALL_SCALES, (1.0,), (0.75, 1.0, 1.25), ALL_SCALES[2:]]},  # of the views
        {"loss": ["hard", "cross_entropy"], "decay": [0.999, 0.99], "lr": [7.5e-6, 1e-4, 3e-4, 1e-3]},
        {"restore": [0.01, 0.001, 0.0], "threshold": [0.69, 0.9]},
    ],
}


def build_model(
    method: str, *, lr: float = 0.0, scales: Sequence[float] = ALL_SCALES, loss: str = "hard", **others: Any
) -> ctta.AdaptiveModel:
    """Build a method with the reference implementation's settings except for these."""
    net, optimizer = ctta.models.load("streets"), partial(torch.optim.Adam, lr=lr)
    if method == "source":
        return ctta.Source(net)
    if method == "tent":  # the reference implementation learns from its argmax
        method_class = ctta.PseudoLabel if loss == "hard" else ctta.Tent
        return method_class(net, optimizer=optimizer, batch_stats=0.0)
    views = multiscale_flip(scales)
    return ctta.CoTTA.official_segmentation(net, optimizer=optimizer, views=views, loss=loss, **others)


def measure_miou(scenes: int, num_rounds: int, method: str, settings: Settings) -> float:
    """Run one trial on one thread and return its mIoU."""
    torch.set_num_threads(1)
    model = build_model(method, **settings)
    stream = rounds(streets(split="choose", num_scenes=scenes, batch_size=1), num_rounds)
    result = ctta.evaluate(model, stream)
    first, last = (100 * sum(part) / len(part) for part in (result.mious[:2], result.mious[-2:]))
    print(f"{method:8}{100 * result.miou:6.2f}  first round {first:.2f}, last {last:.2f}  {settings}", flush=True)
    return result.miou


def main() -> None:
    """Print every trial and the chosen settings."""
    parser = argparse.ArgumentParser(description="Choose the settings of the recipe streets.")
    parser.add_argument("--methods", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--scenes", type=int, default=20, help="scenes per condition")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2, help="number of trials at a time")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for method in arguments.methods:
            trial = partial(measure_miou, arguments.scenes, arguments.rounds, method)
            chosen = {name: values[0] for group in GROUPS[method] for name, values in group.items()}
            scored: dict[str, float] = {}
            for group in GROUPS[method]:
                trials = [chosen | dict(zip(group, values, strict=True)) for values in product(*group.values())]
                new = [settings for settings in trials if str(settings) not in scored]
                scored |= zip(map(str, new), pool.map(trial, new), strict=True)
                chosen = max(trials, key=lambda settings: scored[str(settings)])
            print(f"{method:8}chosen  {chosen}", flush=True)


if __name__ == "__main__":
    main()
