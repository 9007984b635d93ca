"""The methods, one per file. :mod:`ctta.registry` finds them, and others, by name."""

from ctta.base import AdaptiveModel
from ctta.methods.bn_alpha import BNAlpha
from ctta.methods.bn_ema import BNEMA
from ctta.methods.bn_stats import BNStats
from ctta.methods.cotta import CoTTA
from ctta.methods.note import NOTE
from ctta.methods.pseudo_label import PseudoLabel
from ctta.methods.rotta import RoTTA
from ctta.methods.source import Source
from ctta.methods.tent import Tent
from ctta.methods.test_aug import TestAug

__all__ = [
    "BNEMA",
    "METHODS",
    "NOTE",
    "BNAlpha",
    "BNStats",
    "CoTTA",
    "PseudoLabel",
    "RoTTA",
    "Source",
    "Tent",
    "TestAug",
]

#: Every method of the library by its name, in the order of the CoTTA paper's tables.
METHODS: dict[str, type[AdaptiveModel]] = {
    "source": Source,
    "bn_stats": BNStats,
    "pseudo_label": PseudoLabel,
    "tent": Tent,
    "test_aug": TestAug,
    "cotta": CoTTA,
    "rotta": RoTTA,
    "note": NOTE,
    "bn_alpha": BNAlpha,
    "bn_ema": BNEMA,
}
