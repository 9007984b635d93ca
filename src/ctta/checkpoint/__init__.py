"""Save and load streams exactly, without pickle.

>>> import ctta, tempfile
>>> from torch import nn
>>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
>>> model = ctta.Tent(net)
>>> with tempfile.TemporaryDirectory() as folder:
...     ctta.save(model, f"{folder}/camera7.safetensors")
...     model = ctta.load(f"{folder}/camera7.safetensors", net)
"""

from ctta.checkpoint.files import load, save
from ctta.errors import CheckpointError
from ctta.nn.surgery import fingerprint

__all__ = ["CheckpointError", "fingerprint", "load", "save"]
