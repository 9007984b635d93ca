"""Guards around any method: input validation, health without labels, collapse detection, remedies and an event log.

>>> import ctta
>>> from ctta.guard import Guarded
>>> net = ctta.models.embedded()
>>> model = Guarded(ctta.Tent(net))
>>> model.on_collapse
'rollback'
"""

from ctta.checkpoint.encoding import register_settings_class
from ctta.checkpoint.manifest import register_wrapper
from ctta.guard.answers import AccuracyTracker as AccuracyTracker
from ctta.guard.answers import AnswerLog as AnswerLog
from ctta.guard.answers import FeedbackSummary
from ctta.guard.detector import CollapseThresholds
from ctta.guard.estimate import GainEstimate
from ctta.guard.guarded import Guarded
from ctta.guard.health import Event, EventKind, Health, Monitored
from ctta.guard.validator import InputSpec

__all__ = [
    "CollapseThresholds",
    "Event",
    "EventKind",
    "FeedbackSummary",
    "GainEstimate",
    "Guarded",
    "Health",
    "InputSpec",
    "Monitored",
]

register_settings_class("guard", "input_spec", InputSpec)
register_settings_class("guard", "collapse_thresholds", CollapseThresholds)
register_wrapper(
    "guarded",
    Guarded,
    load_only=["audit"],  # a file from elsewhere must not say where to write
    renamed={"good": "last_good", "answers": "accuracy.answers", "gain_monitor": "accuracy.gain_monitor"},
)
