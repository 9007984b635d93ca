"""Street scenes, ten rounds of weather: the paper's Cityscapes to ACDC, and the street that comes with the library."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ctta import models, streams
from ctta.benchmark.recipes.task import Options, Preset, Row, Task
from ctta.methods import BNStats, CoTTA, PseudoLabel, Source
from ctta.methods.cotta import OFFICIAL_SEGMENTATION
from ctta.views import multiscale_flip

NETWORK = "sliding:hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"
#: Chosen by benchmarks/choose_streets_settings.py on other scenes in other weather.
CHOSEN_TENT: Mapping[str, Any] = {"optimizer": partial(torch.optim.Adam, lr=1e-4)}
CHOSEN_COTTA: Mapping[str, Any] = {
    "optimizer": partial(torch.optim.Adam, lr=3e-4),
    "decay": 0.99,
    "threshold": 0.9,
    "views": multiscale_flip((1.0,)),  # mirrored only: a network for small pictures gets worse on other sizes
}


def acdc(options: Options) -> Task:
    """Cityscapes to ACDC: SegFormer-B5, fog, night, rain and snow, 400 scenes each, ten rounds."""
    rows = _papers_rows(options.preset)
    return Task(
        network=lambda: models.load(options.model or NETWORK),
        stream=lambda order: _acdc_stream(options, order),
        rows=rows,
        methods=tuple(rows),
        rounds=10,
    )


def streets(options: Options) -> Task:
    """The embedded street: a tiny SegFormer, fog, night, rain and snow, 20 scenes each, ten rounds."""
    rows = _papers_rows(options.preset)
    if options.preset == "official":  # which the settings were chosen with
        for name, label, chosen in (("tent", "TENT", CHOSEN_TENT), ("cotta", "CoTTA", CHOSEN_COTTA)):
            row = rows[name]
            rows[f"{name}_chosen"] = replace(row, label=f"{label}, chosen", settings={**row.settings, **chosen})
    return Task(
        network=lambda: models.load(options.model or "streets"),
        stream=lambda order: _streets_stream(options, order),
        rows=rows,
        methods=tuple(rows),
        rounds=10,
    )


def _papers_rows(preset: Preset) -> dict[str, Row]:
    variant = {} if preset == "official" else {"loss": "cross_entropy", "predict_with": "teacher"}
    # Norm layers keep their running statistics, and the authors' TENT learns from its own argmax.
    tent = {name: OFFICIAL_SEGMENTATION[name] for name in ("optimizer", "batch_stats")}
    return {
        "source": Row("Source", Source),
        "bn_stats": Row("BN Stats Adapt", BNStats),
        "tent": Row("TENT-continual", PseudoLabel, tent),
        "cotta": Row("CoTTA", CoTTA, {**OFFICIAL_SEGMENTATION, **variant}),
    }


def _acdc_stream(options: Options, order: int | None) -> streams.Stream:
    _check_order("acdc", order)
    if options.data is None:
        raise ValueError(
            "acdc asks for registration on its own site: give --data the folder with rgb_anon and gt in it"
        )
    once = streams.acdc(options.data, batch_size=options.batch_size or 1)
    return _limited(once, options.limit)


def _streets_stream(options: Options, order: int | None) -> streams.Stream:
    _check_order("streets", order)
    if options.data is not None:
        raise ValueError("this recipe draws its own scenes: leave --data out")
    return streams.streets(scenes=options.limit or 20, batch_size=options.batch_size or 1)


def _check_order(recipe: str, order: int | None) -> None:
    if order is not None:
        raise ValueError(f"{recipe} has one order, fog, night, rain, snow: leave --orders out")


def _limited(stream: streams.Stream, limit: int | None) -> streams.Stream:
    if limit is None:
        return stream
    segments = [replace(segment, rows=segment.rows[:limit]) for segment in stream.segments]
    return stream.with_segments(f"limit={limit}", segments)
