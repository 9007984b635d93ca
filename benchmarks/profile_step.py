"""Where the time of a CoTTA step goes: seconds and shares of its parts, mean of a few steps.

python benchmarks/profile_step.py [resnet20 | resnet50]
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from bare import faster_layout, forward
from measuring import seconds
from resnet50 import resnet50
from step_speed import cifar_batch, imagenet_batch

import ctta
from ctta.methods import cotta
from ctta.views import ImageView

#: What is timed: where it is found, and what the table calls it.
PARTS = [
    (ImageView, "augment", "views: making the images"),
    (cotta.CoTTA, "_predict_over_views", "views: teacher, 32 forwards"),
    (cotta.CoTTA, "_find_uncertain", "source, one forward"),
    (cotta.CoTTA, "minimize", "student: backward, finite check, Adam"),
    (cotta, "ema_update_", "teacher: moving average"),
    (cotta, "stochastic_restore_", "student: restore"),
    (cotta.CoTTA, "check_input", "checks of the input"),
]


def timed(function: Callable[..., Any], label: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        answer = []
        spent[label] += seconds(lambda: answer.append(function(*arguments, **keywords)))
        return answer[0]

    return call


def main() -> None:
    large = sys.argv[1:] == ["resnet50"]
    build, x, num_steps = (resnet50, imagenet_batch(), 1) if large else (ctta.models.embedded, cifar_batch(), 5)
    model = ctta.CoTTA(faster_layout(build, x, forward), threshold=1.0)
    model(x)
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, label in PARTS:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), label, spent)))
        total = sum(seconds(lambda: model(x)) for _ in range(num_steps))
    # Making the images happens within the refined answer.
    spent["views: teacher, 32 forwards"] -= spent["views: making the images"]
    spent["student: forward, loss, and what is left"] = total - sum(spent.values())
    for label, time in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{label:44}{time / num_steps:9.4f} s{100 * time / total:7.2f} %")
    print(f"{'one step':44}{total / num_steps:9.4f} s")


if __name__ == "__main__":
    main()
