"""Guards around any method: admission, health without labels, collapse detection, remedies, and a record of it all.

>>> import ctta
>>> from ctta.guard import Guarded
>>> net = ctta.models.embedded()
>>> model = Guarded(ctta.Tent(net))
>>> model.on_collapse
'rollback'
"""

from ctta.guard.events import Event
from ctta.guard.health import Health
from ctta.guard.thresholds import Thresholds
from ctta.guard.validator import Admission
from ctta.guard.wrapper import Guarded

__all__ = ["Admission", "Event", "Guarded", "Health", "Thresholds"]
