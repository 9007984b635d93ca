"""What happens around the updates of a method: restoring, averaging and resetting, combinable with any method.

>>> import ctta, torch
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
>>> model = ctta.adapt(net, "tent", policies=[ctta.policies.reset_every(1000)])
>>> model = ctta.Tent(net, policies=[ctta.policies.average_with_source(0.99), ctta.policies.restore(0.01)])

On the command line it is ``--policy reset_every=1000``. Policies act in the order of the list. Methods that are a
combination are built from them: RDumb is ETA with :data:`reset_every`, ROID has :data:`average_with_source`. To write
one, extend :class:`ctta.policies.Policy`; a checkpoint holds the policies of this package.
"""

from ctta.core.steps import Policy
from ctta.policies.averaging import AverageWithSource, FrozenTeacher, Kalman
from ctta.policies.names import POLICIES, format_policy, parse_policy
from ctta.policies.resetting import AdaptiveReset, ResetEvery, ResetOnLowEntropy
from ctta.policies.restoring import Restore, RestoreByFisher

__all__ = [
    "POLICIES",
    "AdaptiveReset",
    "AverageWithSource",
    "FrozenTeacher",
    "Kalman",
    "Policy",
    "ResetEvery",
    "ResetOnLowEntropy",
    "Restore",
    "RestoreByFisher",
    "adaptive_reset",
    "average_with_source",
    "format_policy",
    "frozen_teacher",
    "kalman",
    "parse_policy",
    "reset_every",
    "reset_on_low_entropy",
    "restore",
    "restore_by_fisher",
]

# The names by which settings read as verbs: policies=[restore(0.01), reset_every(1000)].
restore = Restore
restore_by_fisher = RestoreByFisher
average_with_source = AverageWithSource
kalman = Kalman
frozen_teacher = FrozenTeacher
reset_every = ResetEvery
reset_on_low_entropy = ResetOnLowEntropy
adaptive_reset = AdaptiveReset
