"""The network that a person names."""

from pathlib import Path

from torch import nn

from ctta import models
from ctta.models.placement import to_device


def load_network(spec: str, device: str) -> nn.Module:
    """The network on the device, or one sentence on what is wrong with either."""
    return to_device(models.load(spec), device)


def absolute(spec: str | None) -> str | None:
    """A network named by a file, found from any folder."""
    kind, colon, rest = (spec or "").partition(":")
    return f"{kind}:{Path(rest).expanduser().absolute()}" if colon and kind == "file" else spec
