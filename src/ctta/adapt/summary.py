"""What a call did, for people and programs."""

from collections import Counter
from dataclasses import dataclass

from ctta.adapt.blending import NormalizedBatches
from ctta.adapt.run import InferenceRun
from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.core.registry import name_of
from ctta.data.datasets.image_files import Order
from ctta.guard import Monitored


@dataclass(frozen=True)
class InferenceSummary:
    """Summary of one call of :func:`ctta.adapt.adapt_folder` or :func:`ctta.adapt.adapt_video`.

    Attributes:
        num_images: Images processed by this call.
        num_before: Images processed by earlier calls.
        num_unreadable: Images in the table that could not be read, by this call or earlier ones; the column ``error``
            says why. They are tried again by the next call.
        num_dropped: Images that an earlier call had processed without saving the state, processed again by this one.
        num_changed: Predictions that differ from those of the source network; None if not compared, or if the network
            answers per pixel.
        num_vanished: Images that were deleted before they could be read; if they come back, the next call processes
            them.
        num_skipped: Updates skipped because they were not finite.
        num_by_source: Images of this call for which the guard returned the source's prediction; None without a guard.
        confidence: Mean confidence of the predictions; None if there was no image.
        normalization: How the batches of each size were normalized, without those that the source answered; empty
            without batch statistics.
        seconds: Duration of the processing.
        method: Name of the method: a key of ``ctta.METHODS``, or the name of another class.
        settings: Hyperparameters of the method.
        order: "shuffle", "name" or "time"; the frames of a video come by time.
        events: Number of guard events of each kind, among the last hundred; None without a guard.
        warning: What makes the predictions look worse than the source's; None if nothing does.
        estimated_gain: Accuracy above the source's over the last batches, estimated without labels; None without an
            estimator, or with too few images.
        estimated_gain_low: Lower end of its 90 % interval.
        estimated_gain_high: Upper end.
        changed: Fraction of the predictions, or of the pixels, that differ from the source's; None if not compared.
    """

    num_images: int
    num_before: int
    num_unreadable: int
    num_dropped: int
    num_changed: int | None
    num_vanished: int
    num_skipped: int
    num_by_source: int | None
    confidence: float | None
    normalization: list[NormalizedBatches]
    seconds: float
    method: str
    settings: str
    order: Order
    events: dict[str, int] | None
    warning: str | None
    estimated_gain: float | None = None
    estimated_gain_low: float | None = None
    estimated_gain_high: float | None = None
    changed: float | None = None


def summarize(
    run: InferenceRun,
    *,
    num_before: int,
    num_unreadable: int,
    num_dropped: int,
    num_vanished: int,
    num_skipped_before: int,
    seconds: float,
    order: Order,
) -> InferenceSummary:
    """Return what a run did.

    Args:
        run: The run.
        num_before: Images processed by earlier calls.
        num_unreadable: Images in the table that could not be read.
        num_dropped: Images that were processed again.
        num_vanished: Images, or frames of a camera, that were not processed because they were gone.
        num_skipped_before: Updates that the model had skipped before the run.
        seconds: Duration of the processing.
        order: Order of the images.

    Returns:
        The summary.
    """
    model = run.model
    is_guarded = isinstance(model, Monitored)
    return InferenceSummary(
        num_images=run.num_images,
        num_before=num_before,
        num_unreadable=num_unreadable,
        num_dropped=num_dropped,
        num_changed=round(run.change_sum) if run.source is not None and not run.answers_pixels else None,
        num_vanished=num_vanished,
        num_skipped=model.num_skipped - num_skipped_before,
        num_by_source=run.num_by_source if is_guarded else None,
        confidence=run.confidence_sum / run.num_images if run.num_images else None,
        normalization=run.normalization.list_batches(),
        seconds=seconds,
        method=name_of(type(model.unwrapped)),
        settings=format_hyperparameters(model.unwrapped.hyperparameters),
        order=order,
        events=dict(Counter(event.kind for event in model.events)) if isinstance(model, Monitored) else None,
        warning=run.comparison.describe_harm(),
        changed=run.change_sum / run.num_images if run.source is not None and run.num_images else None,
        **_read_estimate(model),
    )


def _read_estimate(model: AdaptiveModel) -> dict[str, float | None]:
    """Return the estimated gain of a monitored model as fields of the summary."""
    names = ("estimated_gain", "estimated_gain_low", "estimated_gain_high")
    return {name: getattr(model.health, name) if isinstance(model, Monitored) else None for name in names}
