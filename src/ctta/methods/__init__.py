"""The methods, one per file. :mod:`ctta.core.registry` finds them, and others, by name."""

from ctta.core.model import AdaptiveModel
from ctta.methods.adacontrast import AdaContrast
from ctta.methods.bn_alpha import BNAlpha
from ctta.methods.bn_ema import BNEMA
from ctta.methods.bn_stats import BNStats
from ctta.methods.cmf import CMF
from ctta.methods.cotta import CoTTA
from ctta.methods.delta import DELTA
from ctta.methods.deyo import DeYO
from ctta.methods.eata import EATA
from ctta.methods.eta import ETA
from ctta.methods.foa import FOA
from ctta.methods.lame import LAME
from ctta.methods.memo import MEMO
from ctta.methods.note import NOTE
from ctta.methods.palm import PALM
from ctta.methods.petal import PETAL
from ctta.methods.petta import PeTTA
from ctta.methods.pseudo_label import PseudoLabel
from ctta.methods.rdumb import RDumb
from ctta.methods.rem import REM
from ctta.methods.rmt import RMT
from ctta.methods.roid import ROID
from ctta.methods.rotta import RoTTA
from ctta.methods.rpl import RPL
from ctta.methods.santa import SANTA
from ctta.methods.sar import SAR
from ctta.methods.shot_im import SHOTIM
from ctta.methods.slr import SLR
from ctta.methods.sotta import SoTTA
from ctta.methods.source import Source
from ctta.methods.t3a import T3A
from ctta.methods.tea import TEA
from ctta.methods.tent import Tent
from ctta.methods.test_aug import TestAug
from ctta.methods.tribe import TRIBE
from ctta.methods.vane import VANE

__all__ = [
    "BNEMA",
    "CMF",
    "DELTA",
    "EATA",
    "ETA",
    "FOA",
    "LAME",
    "MEMO",
    "METHODS",
    "NOTE",
    "PALM",
    "PETAL",
    "REM",
    "RMT",
    "ROID",
    "RPL",
    "SANTA",
    "SAR",
    "SHOTIM",
    "SLR",
    "T3A",
    "TEA",
    "TRIBE",
    "VANE",
    "AdaContrast",
    "BNAlpha",
    "BNStats",
    "CoTTA",
    "DeYO",
    "PeTTA",
    "PseudoLabel",
    "RDumb",
    "RoTTA",
    "SoTTA",
    "Source",
    "Tent",
    "TestAug",
]

#: Every method of the library by its name, those of the CoTTA paper's tables first.
METHODS: dict[str, type[AdaptiveModel]] = {
    "source": Source,
    "bn_stats": BNStats,
    "pseudo_label": PseudoLabel,
    "tent": Tent,
    "test_aug": TestAug,
    "cotta": CoTTA,
    "rotta": RoTTA,
    "petta": PeTTA,
    "note": NOTE,
    "sotta": SoTTA,
    "tribe": TRIBE,
    "bn_alpha": BNAlpha,
    "bn_ema": BNEMA,
    "eta": ETA,
    "eata": EATA,
    "rpl": RPL,
    "slr": SLR,
    "sar": SAR,
    "rdumb": RDumb,
    "roid": ROID,
    "cmf": CMF,
    "deyo": DeYO,
    "lame": LAME,
    "t3a": T3A,
    "shot_im": SHOTIM,
    "santa": SANTA,
    "rmt": RMT,
    "petal": PETAL,
    "palm": PALM,
    "tea": TEA,
    "memo": MEMO,
    "adacontrast": AdaContrast,
    "delta": DELTA,
    "rem": REM,
    "foa": FOA,
    "vane": VANE,
}
