"""The paper's street scenes: Cityscapes to ACDC, ten rounds of weather."""

from dataclasses import replace

from ctta import models, streams
from ctta.methods import BNStats, CoTTA, PseudoLabel, Source
from ctta.methods.cotta import OFFICIAL_SEGMENTATION
from ctta.recipes.task import Options, Row, Task

NETWORK = "sliding:hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"


def acdc(options: Options) -> Task:
    """Cityscapes to ACDC: SegFormer-B5, fog, night, rain and snow, 400 scenes each, ten rounds."""
    variant = {} if options.preset == "official" else {"loss": "cross_entropy", "predict_with": "teacher"}
    # Norm layers keep their running statistics, and the authors' TENT learns from its own argmax.
    tent = {name: OFFICIAL_SEGMENTATION[name] for name in ("optimizer", "batch_stats")}
    rows = {
        "source": Row("Source", Source),
        "bn_stats": Row("BN Stats Adapt", BNStats),
        "tent": Row("TENT-continual", PseudoLabel, tent),
        "cotta": Row("CoTTA", CoTTA, {**OFFICIAL_SEGMENTATION, **variant}),
    }
    return Task(
        network=lambda: models.load(options.model or NETWORK),
        stream=lambda order: _stream(options, order),
        rows=rows,
        methods=tuple(rows),
        rounds=10,
    )


def _stream(options: Options, order: int | None) -> streams.Stream:
    if order is not None:
        raise ValueError("acdc has one order, fog, night, rain, snow: leave --orders out")
    if options.data is None:
        raise ValueError(
            "acdc asks for registration on its own site: give --data the folder with rgb_anon and gt in it"
        )
    once = streams.acdc(options.data, batch_size=options.batch_size or 1)
    return _limited(once, options.limit)


def _limited(stream: streams.Stream, limit: int | None) -> streams.Stream:
    if limit is None:
        return stream
    segments = [replace(segment, rows=segment.rows[:limit]) for segment in stream.segments]
    return stream.with_segments(f"limit={limit}", segments)
