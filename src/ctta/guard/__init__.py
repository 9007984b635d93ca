"""Guards around any method: admission, health without labels, collapse detection, remedies, and a record of it all.

>>> import ctta
>>> from ctta.guard import Guarded
>>> net = ctta.models.embedded()
>>> model = Guarded(ctta.Tent(net))
>>> model.on_collapse
'rollback'
"""

from ctta.checkpoint.encoding import register_settings_class
from ctta.checkpoint.manifest import register_wrapper
from ctta.guard.events import Event
from ctta.guard.health import Health, Monitored
from ctta.guard.thresholds import Thresholds
from ctta.guard.validator import Admission
from ctta.guard.wrapper import Guarded

__all__ = ["Admission", "Event", "Guarded", "Health", "Monitored", "Thresholds"]

register_settings_class("guard", "admission", Admission)
register_settings_class("guard", "thresholds", Thresholds)
register_wrapper("guarded", Guarded, load_only=["audit"])  # a file from elsewhere must not say where to write
