"""HTTP service for streams of images, each of which adapts on its own; needs the extra ``ctta[serve]``.

A request passes five modules from the socket to its answer:

1. ``http``: bearer token, host and origin; the body, read within the limits; counts, and answers to errors
2. ``protocol`` (Open Inference Protocol) or ``routes`` (images, operators, live page): bytes to tensors and back
3. ``service``: checks of the images
4. ``store``: the queue of the stream, a worker thread, room in memory
5. ``stream``: the call of the model, within the window and the time budget of the stream

``app`` puts them together. If the stream is new or on disk, ``persistence`` creates or reads it between 4 and 5. Of the
others, ``options`` declares what can be set, ``listing`` selects what a page of streams shows, ``metrics`` declares
what is counted, ``audit`` records what happens to streams, ``directory`` remembers what they were started with, and
``cameras`` reads cameras by itself. On many machines, ``ray`` has a front and a process for each of the shards.

>>> import tempfile, ctta, torch
>>> from ctta.guard import Guarded
>>> from ctta.serve import Service, create_app
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> with tempfile.TemporaryDirectory() as directory:
...     app = create_app(Service(Guarded(ctta.Tent(net)), directory, image_size=(8, 8)))    # for uvicorn, one process
>>> app.title
'ctta serve'
"""

import warnings

from ctta.serve.app import create_app, serve
from ctta.serve.cameras import StreamCamera
from ctta.serve.directory import StateDirectory, build_method, resume_method
from ctta.serve.http import Tokens, check_host, read_tokens
from ctta.serve.options import Limits
from ctta.serve.service import Service

__all__ = [
    "Limits",
    "Service",
    "StateDirectory",
    "StreamCamera",
    "Tokens",
    "build_method",
    "check_host",
    "create_app",
    "read_tokens",
    "resume_method",
    "serve",
]


def __getattr__(name: str) -> object:
    if name == "VideoSource":
        warnings.warn("ctta.serve.VideoSource is deprecated: use StreamCamera", DeprecationWarning, stacklevel=2)
        return StreamCamera
    raise AttributeError(f"module 'ctta.serve' has no attribute {name!r}")
