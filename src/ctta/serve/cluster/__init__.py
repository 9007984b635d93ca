"""The service on many machines; needs the extra ``ctta[serve-ray]``.

Each stream has exactly one owner among the replicas, found by hashing its name (``view``). The ``coordinator`` grants
leases and moves streams when replicas come, go or die; a ``replica`` runs the service of one process for the streams
that it owns; ``snapshots`` on shared ``state`` carry them from one owner to the next; the ``front`` sends requests to
where their streams are. None of these knows Ray: ``actors`` and ``ray``
run them on a cluster.
"""

from ctta.serve.cluster.actors import RayOptions
from ctta.serve.cluster.ray import RayService, connect, is_running, wait_for_signal
from ctta.serve.cluster.state import SharedState

__all__ = ["RayOptions", "RayService", "SharedState", "connect", "is_running", "wait_for_signal"]
