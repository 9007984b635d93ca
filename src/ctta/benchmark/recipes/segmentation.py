"""Street scenes, ten rounds of weather: the paper's Cityscapes to ACDC, and the synthetic streets of the library."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ctta import models
from ctta.benchmark.options import BenchmarkOptions, Preset
from ctta.benchmark.recipes.base import BATCH_ONLY, BenchmarkTask, MethodSpec, add_pixel_methods
from ctta.benchmark.recipes.images import CORRUPTION_OPTIONS, corrupted_stream, require_files
from ctta.data import streams
from ctta.errors import ConfigError
from ctta.methods import BNStats, CoTTA, PseudoLabel, Source, Tent
from ctta.methods.cotta import OFFICIAL_SEGMENTATION, SEGMENTATION

NETWORK = "sliding:hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"
#: Chosen by benchmarks/choose/streets_settings.py on other scenes in other weather.
CHOSEN_TENT: Mapping[str, Any] = {"optimizer": partial(torch.optim.Adam, lr=1e-3)}


def acdc(options: BenchmarkOptions) -> BenchmarkTask:
    """Cityscapes to ACDC: SegFormer-B5, fog, night, rain and snow, 400 scenes each, ten rounds."""

    def make_stream(order: int | None) -> streams.Stream:
        _check_order("acdc", order)
        if options.data is None:
            raise ConfigError(
                "ACDC cannot be downloaded without registration on its site: set the option 'data' to the folder that "
                "contains rgb_anon and gt"
            )
        stream = streams.acdc(options.data, batch_size=options.batch_size or 1)
        if options.limit is None:
            return stream
        segments = [replace(segment, rows=segment.rows[: options.limit]) for segment in stream.segments]
        return stream.with_segments(f"limit={options.limit}", segments)

    return _make_task(options, NETWORK, make_stream, _segmentation_methods(options.preset))


def cityscapes_c(options: BenchmarkOptions) -> BenchmarkTask:
    """Cityscapes (--data), corrupted when read: SegFormer-B5 or --model, 15 corruptions of 500 scenes at 512x1024."""
    root, model = require_files("cityscapes-c", options, "--data CITYSCAPES", NETWORK)

    def make_stream(order: int | None) -> streams.Stream:
        scenes = streams.cityscapes(root, size=options.size or (512, 1024))
        return corrupted_stream(scenes, options, order, batch_size=1)

    task = _make_task(options, model, make_stream, _segmentation_methods(options.preset))
    return replace(task, rounds=1, accepts=CORRUPTION_OPTIONS | {"size"})


def streets(options: BenchmarkOptions) -> BenchmarkTask:
    """Synthetic streets: a tiny SegFormer, fog, night, rain and snow, 20 scenes each, ten rounds."""

    def make_stream(order: int | None) -> streams.Stream:
        _check_order("streets", order)
        if options.data is not None:
            raise ConfigError("this recipe draws its own scenes: leave out the option 'data'")
        return streams.streets(num_scenes=options.limit or 20, batch_size=options.batch_size or 1)

    methods = _segmentation_methods(options.preset)
    if options.preset == "official":  # the preset that the settings were chosen with
        methods |= _chosen_methods()
    return _make_task(options, "streets", make_stream, methods)


def _make_task(
    options: BenchmarkOptions,
    network: str,
    make_stream: Callable[[int | None], streams.Stream],
    methods: dict[str, MethodSpec],
) -> BenchmarkTask:
    return BenchmarkTask(
        make_network=lambda: models.load(options.model or network),
        make_stream=make_stream,
        methods=add_pixel_methods(methods),
        default_methods=tuple(methods),
        rounds=10,
    )


def _chosen_methods() -> dict[str, MethodSpec]:
    """Return the methods with settings chosen in other weather, and what each part of CoTTA does by itself."""
    statistics = {"batch_stats": SEGMENTATION["batch_stats"]}
    # The classmethod picks the statistics by looking at the network.
    cotta = {name: value for name, value in SEGMENTATION.items() if name != "batch_stats"}
    without_learning = {"optimizer": partial(torch.optim.Adam, lr=0.0), "restore": 0.0}
    return {
        "bn_stats_blended": MethodSpec("BN Stats, blended", BNStats, {"batch_stats": 0.1}),
        "tent_entropy": MethodSpec("TENT on its entropy", Tent, {**CHOSEN_TENT, **statistics}),
        "cotta_segmentation": MethodSpec("CoTTA segmentation", CoTTA.segmentation, cotta),
        "cotta_views": MethodSpec("CoTTA segmentation: views alone", CoTTA.segmentation, {**cotta, **without_learning}),
        "cotta_learning": MethodSpec("CoTTA segmentation: learning alone", CoTTA.segmentation, {**cotta, "views": ()}),
    }


def _segmentation_methods(preset: Preset) -> dict[str, MethodSpec]:
    """Return the methods of the paper's segmentation table, by name."""
    variant = {} if preset == "official" else {"loss": "cross_entropy", "predict_with": "teacher"}
    # Norm layers keep their running statistics, and TENT in the reference implementation learns from its own argmax.
    tent = {name: OFFICIAL_SEGMENTATION[name] for name in ("optimizer", "batch_stats")}
    return {
        "source": MethodSpec("Source", Source),
        "bn_stats": MethodSpec("BN Stats Adapt", BNStats, BATCH_ONLY),
        "tent": MethodSpec("TENT-continual", PseudoLabel, tent),
        "cotta": MethodSpec("CoTTA", CoTTA, {**OFFICIAL_SEGMENTATION, **variant}),
    }


def _check_order(recipe: str, order: int | None) -> None:
    if order is not None:
        raise ConfigError(f"{recipe} has one order only (fog, night, rain, snow): leave out the option 'orders'")
