"""The rows of the paper's tables, and how a user changes a setting of one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ctta.benchmark.recipes.task import Preset, Row
from ctta.hyperparameters import parse_hyperparameters
from ctta.methods import BNStats, CoTTA, PseudoLabel, Source, Tent, TestAug
from ctta.optim import OptimizerFactory
from ctta.views import Views, fast_image_views, image_views

ADAM = partial(torch.optim.Adam, lr=1e-3)
PRESETS = {"official": CoTTA.official, "paper": CoTTA.paper}

#: What a table compares, and what each part of CoTTA adds.
METHODS = ("source", "bn_stats", "pseudo_label", "tent_online", "tent", "test_aug", "cotta")
ABLATION = ("cotta_weight_average", "cotta_view_average", "cotta")


def paper_rows(
    preset: Preset,
    *,
    tent: OptimizerFactory = ADAM,
    views: Views = image_views(32),
    cotta: Mapping[str, Any],
) -> dict[str, Row]:
    """Every row of the paper's tables, by the names that ``--methods`` takes.

    Args:
        preset: of CoTTA, the authors' code or the text of the paper.
        tent: the optimiser of TENT and of Pseudo-label.
        views: of Test Aug and of CoTTA.
        cotta: its other settings.
    """
    teacher = PRESETS[preset]
    settings = {"views": views, **cotta}
    return {
        "source": Row("Source", Source),
        "bn_stats": Row("BN Stats Adapt", BNStats),
        "pseudo_label": Row("Pseudo-label", PseudoLabel, {"optimizer": tent}),
        "tent_online": Row("TENT-online*", Tent, {"optimizer": tent}, reset_at_domain=True),
        "tent": Row("TENT-continual", Tent, {"optimizer": tent}),
        "test_aug": Row("Test Aug", TestAug, {"views": views}),
        "cotta_weight_average": Row("CoTTA: weight-avg", teacher, {**settings, "views": (), "restore": 0.0}),
        "cotta_view_average": Row("CoTTA: + aug-avg", teacher, {**settings, "restore": 0.0}),
        "cotta": Row("CoTTA", teacher, settings),
        "cotta_fast": Row("CoTTA fast", teacher, {**settings, "views": fast_image_views()}),
    }


def with_settings(rows: Mapping[str, Row], settings: tuple[str, ...]) -> dict[str, Row]:
    """The rows with what a user asked for, each as ``<row>.<setting>=<value>``.

    Values read as in :func:`ctta.hyperparameters.parse_hyperparameters`.

    >>> rows = paper_rows("official", cotta={})
    >>> with_settings(rows, ("cotta.restore=0.005", "tent.lr=0.01"))["cotta"].settings["restore"]
    0.005
    """
    changed = dict(rows)
    for setting in settings:
        target, equals, text = setting.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and key):
            raise ValueError(f"a setting reads METHOD.NAME=VALUE, such as cotta.restore=0.005; got {setting!r}")
        if name not in changed:
            raise ValueError(f"{setting!r} is for a method that is not in this table: {', '.join(changed)}")
        if key == "seed":
            raise ValueError(f"seeds are given by --seeds, not by {setting!r}")
        row = changed[name]
        typed = parse_hyperparameters(row.method, [f"{key}={text}"], row.settings)
        changed[name] = replace(row, settings={**row.settings, **typed})
    return changed
