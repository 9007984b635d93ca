"""Where the time of a CoTTA step goes: seconds and percentage of each part, mean of a few steps.

python -m benchmarks.speed.profile_step [resnet20 | resnet50]
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import ctta
from benchmarks.speed.baseline import faster_layout, forward
from benchmarks.speed.measurements import seconds
from benchmarks.speed.resnet50 import resnet50
from benchmarks.speed.steps import cifar_batch, imagenet_batch
from ctta.methods import cotta
from ctta.views import ImageView

#: Functions to time: owner, attribute, and label in the table.
PARTS = [
    (ImageView, "augment_together", "views: augmentation"),
    (cotta.CoTTA, "_predict_over_views", "views: teacher, 32 forwards"),
    (cotta.CoTTA, "_find_uncertain", "source, one forward"),
    (cotta.CoTTA, "minimize", "student: backward, finite check, Adam"),
    (cotta, "ema_update_", "teacher: exponential moving average"),
    (cotta, "stochastic_restore_", "student: restore"),
    (cotta.CoTTA, "check_input", "input validation"),
]


def timed(function: Callable[..., Any], label: str, spent: dict[str, float]) -> Callable[..., Any]:
    """Return the function with its time added to an entry of ``spent``."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = []
        spent[label] += seconds(lambda: result.append(function(*arguments, **keywords)))
        return result[0]

    return call


def main() -> None:
    """Print the table."""
    large = sys.argv[1:] == ["resnet50"]
    build, x, num_steps = (resnet50, imagenet_batch(), 1) if large else (ctta.models.embedded, cifar_batch(), 5)
    model = ctta.CoTTA(faster_layout(build, x, forward), threshold=1.0)
    model(x)
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, label in PARTS:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), label, spent)))
        total = sum(seconds(lambda: model(x)) for _ in range(num_steps))
    # Augmentation happens within the teacher's predictions.
    spent["views: teacher, 32 forwards"] -= spent["views: augmentation"]
    spent["student: forward, loss, and everything else"] = total - sum(spent.values())
    for label, time in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{label:44}{time / num_steps:9.4f} s{100 * time / total:7.2f} %")
    print(f"{'one step':44}{total / num_steps:9.4f} s")


if __name__ == "__main__":
    main()
