"""Streams of images over HTTP, each adapting by itself: the extra ``ctta[serve]``.

>>> import tempfile, ctta, torch
>>> from ctta.guard import Guarded
>>> from ctta.serve import Service, application
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> with tempfile.TemporaryDirectory() as folder:
...     app = application(Service(Guarded(ctta.Tent(net)), folder, size=(8, 8)))    # for uvicorn, in one process
>>> app.title
'ctta serve'
"""

from ctta.serve.app import application
from ctta.serve.auth import Tokens
from ctta.serve.choice import method_by_name
from ctta.serve.limits import Limits
from ctta.serve.running import check_address, read_tokens, serve
from ctta.serve.service import Service

__all__ = ["Limits", "Service", "Tokens", "application", "check_address", "method_by_name", "read_tokens", "serve"]
