"""The methods, one file or folder each; :mod:`ctta.core.registry` finds them, and others, by name.

To add one, write its file and import it here: its name is that of its module, and :data:`METHODS`, the command line,
``ctta.<Class>`` and the tests follow. The order is that of tables: the methods of the CoTTA paper first.
"""

# ruff: noqa: I001

from ctta.methods.source import Source as Source
from ctta.methods.bn_stats import BNStats as BNStats
from ctta.methods.pseudo_label import PseudoLabel as PseudoLabel
from ctta.methods.tent import Tent as Tent
from ctta.methods.test_aug import TestAug as TestAug
from ctta.methods.cotta import CoTTA as CoTTA
from ctta.methods.rotta import RoTTA as RoTTA
from ctta.methods.petta import PeTTA as PeTTA
from ctta.methods.note import NOTE as NOTE
from ctta.methods.sotta import SoTTA as SoTTA
from ctta.methods.tribe import TRIBE as TRIBE
from ctta.methods.bn_alpha import BNAlpha as BNAlpha
from ctta.methods.bn_ema import BNEMA as BNEMA
from ctta.methods.unmix_tns import UnMixTNS as UnMixTNS
from ctta.methods.eta import ETA as ETA
from ctta.methods.eata import EATA as EATA
from ctta.methods.rpl import RPL as RPL
from ctta.methods.slr import SLR as SLR
from ctta.methods.sar import SAR as SAR
from ctta.methods.rdumb import RDumb as RDumb
from ctta.methods.roid import ROID as ROID
from ctta.methods.cmf import CMF as CMF
from ctta.methods.deyo import DeYO as DeYO
from ctta.methods.zerosiam import ZeroSiam as ZeroSiam
from ctta.methods.lame import LAME as LAME
from ctta.methods.t3a import T3A as T3A
from ctta.methods.neo import NEO as NEO
from ctta.methods.tda import TDA as TDA
from ctta.methods.dota import DOTA as DOTA
from ctta.methods.shot_im import SHOTIM as SHOTIM
from ctta.methods.santa import SANTA as SANTA
from ctta.methods.rmt import RMT as RMT
from ctta.methods.petal import PETAL as PETAL
from ctta.methods.palm import PALM as PALM
from ctta.methods.tea import TEA as TEA
from ctta.methods.memo import MEMO as MEMO
from ctta.methods.adacontrast import AdaContrast as AdaContrast
from ctta.methods.delta import DELTA as DELTA
from ctta.methods.rem import REM as REM
from ctta.methods.foa import FOA as FOA
from ctta.methods.pea import PEA as PEA
from ctta.methods.vane import VANE as VANE

from ctta.core.model import AdaptiveModel

#: Every method of the library by its name.
METHODS: dict[str, type[AdaptiveModel]] = {
    cls.__module__.split(".")[2]: cls
    for cls in tuple(vars().values())
    if isinstance(cls, type) and issubclass(cls, AdaptiveModel) and cls is not AdaptiveModel
}
